"""`trtllm-tokenweave bench`: measure the kernel on the GPUs of this machine, and redraw plots from results."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_tokenweave.atomic import check_target, replace_file
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import preset as model_preset
from trtllm_tokenweave.report import write_picture

app = typer.Typer(no_args_is_help=True, help="Measure on the GPUs of this machine; redraw plots.")


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{text!r} is no list of numbers", where=option, fix="separate them by commas") from None
    if any(n < 1 for n in found):
        raise UserError("a number is below 1", where=option)
    return found


def _need_gpus(needed: int) -> None:
    if importlib.util.find_spec("torch") is None:
        fix = f"on a machine with {needed} GPU(s): pip install '.[torch]' (README.md)"
        raise UserError("PyTorch is not installed", where="bench", fix=fix)
    import torch

    if torch.cuda.device_count() < needed:
        raise UserError(f"this machine has {torch.cuda.device_count()} GPUs, {needed} needed", where="bench")


def _finish(document: Mapping[str, Any], output: Path | None, as_json: bool) -> None:
    text = json.dumps(document, indent=1) + "\n"
    if output is not None:
        replace_file(output, lambda aside: aside.write_text(text))
    if as_json or output is None:
        print(text, end="")
    else:
        print(f"wrote {output}")


Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write the JSON here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the JSON document.")]


@app.command()
def kernel(
    hidden: Annotated[str, typer.Option(help="Hidden sizes.")] = "8192",
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "64,128,256,512,1024,2048,4096,8192,16384",
    peers: Annotated[bool, typer.Option(help="Time NCCL, PyTorch and FlashInfer beside it.")] = True,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time AllReduceRmsNorm on two GPUs against its peers and the link's floor; each is verified first."""
    sizes, counts = _numbers(hidden, "--hidden"), _numbers(tokens, "--tokens")
    if output is not None:
        check_target(output)
    _need_gpus(2)
    from trtllm_tokenweave.bench.kernel import KernelBench, measure_kernel

    _finish(measure_kernel(KernelBench(sizes, counts, peers)), output, as_json)


@app.command()
def overlap(output: Output = None, as_json: AsJson = False) -> None:
    """Time a GEMM beside the collective of the other half, by CTA count, eager and in a CUDA graph."""
    if output is not None:
        check_target(output)
    _need_gpus(2)
    from trtllm_tokenweave.bench.overlap import measure_overlap

    _finish(measure_overlap(), output, as_json)


@app.command()
def gemm(
    preset: Annotated[str, typer.Option(help="Model shape.")] = "llama-3.3-70b",
    tp: Annotated[str, typer.Option(metavar="N,N...", help="tp sizes whose shapes to measure.")] = "2,8",
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time a model's GEMMs by token count on one GPU, for `plan --predict --gemm`."""
    sizes, config = _numbers(tp, "--tp"), model_preset(preset)
    for size in sizes:
        config.local(size)
    if output is not None:
        check_target(output)
    _need_gpus(1)
    from trtllm_tokenweave.bench.gemm import measure_gemms

    _finish(measure_gemms(config, sizes).model_dump(mode="json"), output, as_json)


@app.command()
def stack(
    preset: Annotated[str, typer.Option(help="Model shape.")] = "llama-3.3-70b",
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 8,
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "1024,2048,4096,8192",
    gemm: Annotated[str, typer.Option(help="Whose GEMMs woven engines have: trt, budget, or both.")] = "trt,budget",
    gemm_sms: Annotated[int, typer.Option(help="SMs that budget GEMMs keep to beside a collective.")] = 116,
    ctas: Annotated[int, typer.Option(help="CTAs of a collective beside the other half's work.")] = 16,
    offset: Annotated[int, typer.Option(help="Tokens that the prefix half has more than half of them.")] = 0,
    sweep_ctas: Annotated[str, typer.Option(help="CTAs to try besides.")] = "4,6,8,12,16,24",
    symmetric: Annotated[bool, typer.Option(help="Activations in symmetric memory, else collectives copy.")] = True,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time decoder layers in TensorRT engines, stock and woven; run it under mpirun, one process a GPU."""
    from pydantic import ValidationError

    from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow
    from trtllm_tokenweave.table.files import table_error

    model_preset(preset)
    counts, gemms = _numbers(tokens, "--tokens"), tuple(gemm.split(","))
    if not set(gemms) <= {"trt", "budget"} or len(set(gemms)) != len(gemms):
        raise UserError(f"{gemm!r} is neither trt, budget nor both", where="--gemm")
    try:
        launch = LaunchConfig(ctas=ctas, gemm_sms=gemm_sms)
        row = TableRow(tokens=Bucket(lo=1), mode="weave", split_offset=offset, attention=launch, mlp=launch)
        sweep = tuple(LaunchConfig(ctas=n).ctas for n in _numbers(sweep_ctas, "--sweep-ctas"))
    except ValidationError as error:
        raise table_error(error, "bench stack") from None
    if output is not None:
        check_target(output)
    _need_gpus(2)
    from trtllm_tokenweave.bench.stack_run import StackArguments, run_stack

    document = run_stack(StackArguments(preset, layers, counts, gemms, row, sweep, symmetric))
    if document is not None:
        _finish(document, output, as_json)


@app.command()
def plot(
    result: Annotated[Path, typer.Argument(help="JSON of `bench kernel`.")],
    hidden: Annotated[int, typer.Option(help="Hidden size to draw.")] = 8192,
    as_json: AsJson = False,
) -> None:
    """Redraw the plots of a result beside it (PNG and SVG)."""
    from trtllm_tokenweave.bench.plots import draw_kernel, kernel_rows

    try:
        document = json.loads(result.read_text())
        rows = kernel_rows(document, hidden)
        drawn = draw_kernel(document, hidden) if rows else None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(result)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fix = "give the JSON of bench kernel: other results have no plot"
        raise UserError(f"is no result of bench kernel ({type(error).__name__})", where=str(result), fix=fix) from None
    if drawn is None:
        raise UserError(f"has no rows of hidden size {hidden}", where=str(result))
    written = write_picture(drawn, result.parent, result.stem)
    if as_json:
        print(json.dumps({"written": [str(path) for path in written]}))
    else:
        for path in written:
            print(f"wrote {path}")
