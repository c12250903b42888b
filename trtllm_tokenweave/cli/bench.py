"""`trtllm-tokenweave bench`: measure the kernel on the GPUs of this machine, and redraw plots from results."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_tokenweave.atomic import check_folder, check_target, replace_file, same_file
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import preset as model_preset
from trtllm_tokenweave.report import Picture, picture_files, plots_html, write_files

LOADERS = ("auto", "cp_async", "bulk", "push")  # bench/kernel.py knows them, and needs torch
MAX_RANKS = 8  # TW_MAX_RANKS

_NUMBERS = "give numbers above 0, separated by commas: 512,1024"

app = typer.Typer(no_args_is_help=True, help="Measure on the GPUs of this machine; redraw plots.")


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Numbers above 0 of a comma-separated list."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{text!r} is no list of numbers", where=option, fix=_NUMBERS) from None
    if any(n < 1 for n in found):
        raise UserError("a number is below 1", where=option, fix=_NUMBERS)
    return found


def _need_gpus(needed: int) -> None:
    if importlib.util.find_spec("torch") is None:
        fix = f"on a machine with {needed} GPU(s): pip install 'torch>=2.5'"
        raise UserError("PyTorch is not installed", where="bench", fix=fix)
    import torch

    if torch.cuda.device_count() < needed:
        raise UserError(f"this machine has {torch.cuda.device_count()} GPUs, {needed} needed", where="bench")


def _check_output_and_gpus(output: Path | None, gpus: int) -> None:
    if output is not None:
        check_target(output)
    _need_gpus(gpus)


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def _write(document: Mapping[str, Any], output: Path | None) -> None:
    if output is not None:
        replace_file(output, lambda aside: aside.write_text(_text(document)))


def _finish(document: Mapping[str, Any], output: Path | None, as_json: bool) -> None:
    _write(document, output)
    if as_json or output is None:
        print(_text(document), end="")
    else:
        print(f"wrote {output}")


def _check_ctas(command: str, *counts: int) -> None:
    """Refuse numbers of CTAs that no table may have."""
    from pydantic import ValidationError

    from trtllm_tokenweave.table import LaunchConfig
    from trtllm_tokenweave.table.files import table_error

    try:
        for count in counts:
            LaunchConfig(ctas=count)
    except ValidationError as error:
        raise table_error(error, command) from None


def _check_output(output: Path | None, table: Path | None) -> None:
    """Refuse what cannot become the result, or is the table that it is measured with."""
    if output is None:
        return
    if table is not None and same_file(output, table):
        raise UserError(f"{output} is the table", where="--output", fix="write the result to another file")
    check_target(output)


Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write the JSON here.")]
TimingCache = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep TensorRT's timings here: a second run builds quicker.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the JSON document.")]


@app.command()
def kernel(
    hidden: Annotated[str, typer.Option(help="Hidden sizes.")] = "8192",
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "64,128,256,512,1024,2048,4096,8192,16384",
    peers: Annotated[bool, typer.Option(help="Time NCCL, PyTorch and FlashInfer beside it.")] = True,
    loaders: Annotated[str, typer.Option(help="How the kernel moves rows: auto,cp_async,bulk,push.")] = "auto",
    ctas: Annotated[str, typer.Option(help="CTAs to try.")] = "4,8,12,16,20,24,32,48,64,96,132",
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time AllReduceRmsNorm on two GPUs against its peers and the link's floor; each is verified first."""
    sizes, counts, grids = numbers(hidden, "--hidden"), numbers(tokens, "--tokens"), numbers(ctas, "--ctas")
    names = _loaders(loaders)
    _check_output_and_gpus(output, 2)
    from trtllm_tokenweave.bench.kernel import KernelBench, measure_kernel

    _finish(measure_kernel(KernelBench(sizes, counts, peers, names, grids)), output, as_json)


def _loaders(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(LOADERS):
        raise UserError(f"{text!r} names another loader than {', '.join(LOADERS)}", where="--loaders")
    return names


@app.command()
def loopback(
    ranks: Annotated[str, typer.Option(help="Numbers of virtual ranks.")] = "2,4,8",
    hidden: Annotated[str, typer.Option(help="Hidden sizes.")] = "8192",
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "512,4096",
    loaders: Annotated[str, typer.Option(help="How the kernel moves rows: auto,cp_async,bulk,push.")] = "cp_async,bulk",
    ctas: Annotated[str, typer.Option(help="CTAs of each rank to try.")] = "4,8,16",
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time AllReduceRmsNorm among virtual ranks on one GPU: what few CTAs do where the link is no limit."""
    sizes = numbers(ranks, "--ranks")
    if max(sizes) > MAX_RANKS:
        raise UserError(f"{max(sizes)} is above {MAX_RANKS}", where="--ranks", fix="give fewer ranks")
    hiddens, counts, grids = numbers(hidden, "--hidden"), numbers(tokens, "--tokens"), numbers(ctas, "--ctas")
    names = _loaders(loaders)
    _check_output_and_gpus(output, 1)
    from trtllm_tokenweave.bench.loopback import LoopbackBench, measure_loopback

    _finish(measure_loopback(LoopbackBench(sizes, hiddens, counts, names, grids)), output, as_json)


@app.command()
def overlap(output: Output = None, as_json: AsJson = False) -> None:
    """Time a GEMM beside the collective of the other half, by CTA count, eager and in a CUDA graph."""
    _check_output_and_gpus(output, 2)
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
    sizes, config = numbers(tp, "--tp"), model_preset(preset)
    for size in sizes:
        config.local(size)
    _check_output_and_gpus(output, 1)
    from trtllm_tokenweave.bench.gemm import measure_gemms

    _finish(measure_gemms(config, sizes).model_dump(mode="json"), output, as_json)


@app.command()
def stack(
    preset: Annotated[str, typer.Option(help="Model shape.")] = "llama-3.3-70b",
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 8,
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "1024,2048,4096,8192",
    gemm: Annotated[str, typer.Option(help="Whose GEMMs woven engines have: trt, budget, or both.")] = "trt,budget",
    gemm_sms: Annotated[int, typer.Option(help="SMs that budget GEMMs keep to beside a collective.")] = 124,
    ctas: Annotated[int, typer.Option(help="CTAs of a collective beside the other half's work.")] = 8,
    offset: Annotated[int, typer.Option(help="Tokens that the prefix half has more than half of them.")] = 0,
    sweep_ctas: Annotated[str, typer.Option(help="CTAs to try per token count; the best are timed.")] = "4,8,12,16",
    symmetric: Annotated[bool, typer.Option(help="Activations in symmetric memory, else collectives copy.")] = True,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tuning table in the place of the four options above.")
    ] = None,
    timing_cache: TimingCache = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time decoder layers in TensorRT engines, stock and woven; run it under mpirun, one process a GPU."""
    from pydantic import ValidationError

    from trtllm_tokenweave.decoder import check_table
    from trtllm_tokenweave.table import Bucket, LaunchConfig, TableRow, load_table
    from trtllm_tokenweave.table.files import table_error

    config = model_preset(preset)
    counts, gemms = numbers(tokens, "--tokens"), tuple(gemm.split(","))
    if not set(gemms) <= {"trt", "budget"} or len(set(gemms)) != len(gemms):
        raise UserError(f"{gemm!r} is neither trt, budget nor both", where="--gemm")
    try:
        launch = LaunchConfig(ctas=ctas, gemm_sms=gemm_sms)
        row = TableRow(tokens=Bucket(lo=1), mode="weave", split_offset=offset, attention=launch, mlp=launch)
        sweep = tuple(LaunchConfig(ctas=n).ctas for n in numbers(sweep_ctas, "--sweep-ctas"))
    except ValidationError as error:
        raise table_error(error, "bench stack") from None
    if table is not None:
        given = load_table(table)
        check_table(given, config, given.key.tp_size, str(table))  # ranks are compared once they are known
    _check_output(output, table)
    _need_gpus(2)
    from trtllm_tokenweave.bench.stack_run import StackArguments, run_stack

    arguments = StackArguments(preset, layers, counts, gemms, row, sweep, symmetric, table, timing_cache)
    document = run_stack(arguments)
    if document is not None:
        _finish(document, output, as_json)


@app.command()
def e2e(
    preset: Annotated[str, typer.Option(help="Model shape.")] = "llama-3.3-70b",
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 8,
    tokens: Annotated[str, typer.Option(help="Token counts of the prefilled sequence.")] = "1024,2048,4096,8192,16384",
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tuning table that says the split; default: try --offsets.")
    ] = None,
    offsets: Annotated[str, typer.Option(help="Splits to try besides half: tokens moved to the prefix half.")] = (
        "128,256,384,512,768,1024"
    ),
    ctas: Annotated[str, typer.Option(help="CTAs to try for a collective beside the other half's work.")] = "4,8",
    engines: Annotated[str, typer.Option(help="Engines to build and time.")] = (
        "stock,peer,fuse_only,woven,whole,no_comm"
    ),
    gemm_plugin: Annotated[
        bool, typer.Option(help="Products by the Gemm plugin in all engines, as trtllm-build --gemm_plugin.")
    ] = False,
    timing_cache: TimingCache = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time whole decoders in TensorRT engines, prefill with real attention; run it under mpirun, one process a GPU."""
    from trtllm_tokenweave.bench.e2e_run import E2eArguments, check_arguments, run_e2e

    model_preset(preset)
    # A step of a token count has one graph a split: a second row of it would replay the first one's.
    counts = tuple(dict.fromkeys(numbers(tokens, "--tokens")))
    moved, tried = numbers(offsets, "--offsets"), numbers(ctas, "--ctas")
    _check_ctas("bench e2e", *tried)
    chosen = tuple(engines.split(","))
    arguments = E2eArguments(preset, layers, counts, table, (0, *moved), tried, chosen, timing_cache, gemm_plugin)
    check_arguments(arguments)
    _check_output(output, table)
    if timing_cache is not None:
        check_folder(timing_cache)
    _need_gpus(2)
    document = run_e2e(arguments, lambda so_far: _write(so_far, output))
    if document is not None:
        _finish(document, output, as_json)


@app.command()
def trace(
    preset: Annotated[str, typer.Option(help="Model shape.")] = "llama-3.3-70b",
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="Requests; all are there at the start.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of lengths, and of the tokens.")] = 0,
    chunks: Annotated[str, typer.Option(help="Most tokens of a step: prompts are read in such chunks.")] = (
        "1024,2048,4096,8192"
    ),
    max_batch_size: Annotated[int, typer.Option(min=1, help="Most requests in a step.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each engine through the trace.")] = 2,
    tail: Annotated[bool, typer.Option(help="Go on when all prompts are read, until all is generated.")] = True,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tuning table: adds the tuned split to the even one.")
    ] = None,
    ctas: Annotated[int, typer.Option(help="CTAs of a collective beside the other half's work, at even splits.")] = 8,
    min_tokens: Annotated[
        int | None, typer.Option(min=1, help="Least tokens of a step that is split; default: the table's.")
    ] = None,
    multiple_profiles: Annotated[bool, typer.Option(help="Kernels of their own for steps of few tokens.")] = False,
    engines: Annotated[str, typer.Option(help="Engines to build and time; whole: attention not split.")] = (
        "stock,peer,fuse_only,woven,no_comm"
    ),
    timing_cache: TimingCache = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time a serving trace with ShareGPT's lengths, chunked prefill and decode mixed; under mpirun, a process a GPU."""
    from trtllm_tokenweave.bench.trace_run import TraceArguments, check_arguments, run_trace

    budgets, chosen = tuple(dict.fromkeys(numbers(chunks, "--chunks"))), tuple(engines.split(","))
    _check_ctas("bench trace", ctas)
    arguments = TraceArguments(
        preset=preset,
        layers=layers,
        requests=requests,
        seed=seed,
        chunks=budgets,
        max_batch_size=max_batch_size,
        rounds=rounds,
        tail=tail,
        table=table,
        ctas=ctas,
        min_tokens=min_tokens,
        multiple_profiles=multiple_profiles,
        engines=chosen,
        timing_cache=timing_cache,
    )
    check_arguments(arguments)
    _check_output(output, table)
    if timing_cache is not None:
        check_folder(timing_cache)
    _need_gpus(2)
    document = run_trace(arguments, lambda so_far: _write(so_far, output))
    if document is not None:
        _finish(document, output, as_json)


@app.command()
def plot(
    result: Annotated[Path, typer.Argument(help="JSON of bench kernel, stack, e2e or trace, or of tune.")],
    hidden: Annotated[int, typer.Option(help="Of bench kernel: hidden size to draw.")] = 8192,
    report: Annotated[Path | None, typer.Option(metavar="HTML", help="Write one page with all plots, too.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Folder of the plots; default: the result's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Redraw the plots of a result (PNG and SVG)."""
    from trtllm_tokenweave.bench.results import facts

    if report is not None:
        _check_report(report, result)
    document, pictures = _pictures(result, hidden)
    folder = _plots_folder(result, output)
    stems = {f"{result.stem}_{name}" if name else result.stem: picture for name, picture in pictures.items()}
    for path in (folder / f"{stem}{suffix}" for stem in stems for suffix in (".png", ".svg")):
        if same_file(path, result):
            raise UserError("is the name of one of its plots", where=str(result), fix="name the result NAME.json")
        if report is not None and same_file(path, report):
            raise UserError(f"{report} is the name of a plot", where="--report", fix="name the page NAME.html")
    files = [file for stem, drawn in stems.items() for file in picture_files(drawn, folder, stem)]
    if report is not None:
        page = plots_html(result.stem, str(document.get("what", "")), facts(document), list(pictures.values()))
        files.append((report, page.encode("utf-8", "backslashreplace")))  # JSON may hold half a letter
    write_files(files)
    written = [path for path, _ in files]
    if as_json:
        print(json.dumps({"written": [str(path) for path in written]}))
    else:
        for path in written:
            print(f"wrote {path}")


def _check_report(report: Path, result: Path) -> None:
    """Refuse a page that would replace the result, or another file that is no page."""
    fix = "write the page to another file"
    if same_file(report, result):
        raise UserError(f"{report} is the result to draw", where="--report", fix=fix)
    check_target(report)
    check_folder(report.parent)
    try:
        with report.open("rb") as file:
            head = file.read(512).lstrip().lower()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{report} cannot be read: {error.strerror}", where="--report", fix=fix) from None
    if head and not head.startswith((b"<!doctype html", b"<html")):
        raise UserError(f"{report} is there and is no HTML", where="--report", fix=fix)


def _plots_folder(result: Path, output: Path | None) -> Path:
    """The folder of the plots, checked before anything is written."""
    folder = result.parent if output is None else output
    try:
        check_folder(folder)
    except UserError as error:
        if output is not None:
            raise
        fix = "choose another folder for the plots with -o DIR"
        raise UserError(error.what, where=error.where, fix=fix) from None
    return folder


def _pictures(result: Path, hidden: int) -> tuple[dict[str, Any], dict[str, Picture]]:
    """A result and its pictures by name; the only one of bench kernel has none."""
    from trtllm_tokenweave.bench.plots import draw_kernel, kernel_rows
    from trtllm_tokenweave.bench.results import KERNEL, read_result
    from trtllm_tokenweave.bench.tune_plots import pictures_of

    document, kind = read_result(result)
    try:
        if kind != KERNEL:
            return document, pictures_of(document)
        if kernel_rows(document, hidden):
            return document, {"": draw_kernel(document, hidden)}
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        lack = f"it has no {error}" if isinstance(error, KeyError) else "its values are of another kind"
        what = f"is no whole result of {kind.name}: {lack}"
        raise UserError(what, where=str(result), fix="measure again, or mend the file") from None
    sizes = sorted({row["hidden"] for row in document["rows"]})
    fix = f"give one that it has: {', '.join(map(str, sizes))}"
    raise UserError(f"{result} has no rows of hidden size {hidden}", where="--hidden", fix=fix)
