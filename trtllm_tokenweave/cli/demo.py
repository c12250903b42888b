"""`trtllm-tokenweave demo`: a real model, stock and woven, side by side."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections import Counter
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from trtllm_tokenweave import __version__
from trtllm_tokenweave.atomic import check_folder, check_target
from trtllm_tokenweave.checkpoint import Checkpoint, open_checkpoint, smollm2_gguf
from trtllm_tokenweave.cli.console import make_console, steps_said
from trtllm_tokenweave.cli.inspect import already_woven, describe, mapping_of, network_table
from trtllm_tokenweave.comm import CommBackend, MpiComm
from trtllm_tokenweave.config import read_environment
from trtllm_tokenweave.demo import DemoOptions, DemoResult, check_network, run_demo
from trtllm_tokenweave.demo.gpu import GpuRun, run_on_gpus
from trtllm_tokenweave.demo.model import demo_table
from trtllm_tokenweave.demo.mpi import run_under_mpi
from trtllm_tokenweave.demo.timeline import timeline
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.picture import draw_schedule
from trtllm_tokenweave.recorder import load
from trtllm_tokenweave.report import DemoReport, RefusedRow, SiteRow, write_picture, write_report
from trtllm_tokenweave.table import TuningTable

LIMITS = (
    "The networks run on a numpy interpreter of TensorRT's object model: what is shown is that the woven network "
    "computes the same, not how fast it is.",
    "The demo brings its own table, which splits steps of a dozen tokens; by default dense models split from 1024.",
    "Sums are made in rank order, so results repeat; on GPUs the order of additions may differ.",
)
_FILES = ("report.html", "schedule.png", "schedule.svg")


def demo(
    tp: Annotated[int | None, typer.Option(help="Ranks; 3 by default, under mpirun its number of processes.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="GGUF file, Hugging Face or TensorRT-LLM folder; default: SmolLM2-135M.")
    ] = None,
    network: Annotated[
        Path | None, typer.Option(help="Weave and check this recorded network, saved before it was woven.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt, may be repeated; default: six of them.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.")] = DemoOptions.max_new_tokens,
    mpi: Annotated[bool, typer.Option(help="Run again under mpirun, one process a rank, where there is MPI.")] = True,
    gpu: Annotated[bool, typer.Option(help="Run it through TensorRT too, where there are GPUs.")] = True,
    report: Annotated[bool, typer.Option(help="Write the picture and the report.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the report.")] = Path("demo_report"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Weave a real Llama, run it beside the stock network, and show that both say the same."""
    if network is not None:
        if prompt or checkpoint is not None or tp is not None:
            raise UserError("goes without --prompt, --checkpoint and --tp", where="--network")
        _network(network, as_json)
        return
    comm = _ranks(tp)
    leader = comm is None or comm.rank == 0
    if report and leader:
        check_folder(out)
        if out.exists():
            for name in _FILES:
                check_target(out / name)
    console = make_console(stderr=True, quiet=not leader)
    options = DemoOptions(
        tp_size=(DemoOptions.tp_size if tp is None else tp) if comm is None else comm.size,
        max_new_tokens=max_new_tokens,
        prompts=tuple(prompt) if prompt else DemoOptions.prompts,
    )
    model = open_checkpoint(checkpoint if checkpoint is not None else smollm2_gguf(), dtype="float32")

    def say(line: str) -> None:
        console.print(escape(line), style="dim")

    result = run_demo(model, options, say, comm)
    if not leader:
        return
    document = _document(result, model, options.tp_size)
    document["mpi"] = None
    if mpi and comm is None:
        document["mpi"] = run_under_mpi(options.tp_size, _words(checkpoint, max_new_tokens, prompt or []), say)
    document["gpu"] = None
    if gpu and comm is None:
        document["gpu"] = run_on_gpus(_gpu_run(checkpoint, model, options), say)
    document["report"] = str(_write(result, model, options, document, out)) if report else None
    if as_json:
        print(json.dumps(document))
    else:
        _print(document, result, options)
    failed = (document["mpi"] or {}).get("identical") is False or "error" in (document["gpu"] or {})
    if not document["identical"] or failed:
        raise typer.Exit(1)


def _gpu_run(checkpoint: Path | None, model: Checkpoint, options: DemoOptions) -> GpuRun:
    def table(ranks: int, dtype: str) -> TuningTable:
        made = demo_table(model, replace(options, tp_size=ranks))
        return made.model_copy(update={"key": made.key.model_copy(update={"dtype": dtype})})

    path = smollm2_gguf() if checkpoint is None else checkpoint
    sizes = options.max_batch_size, options.max_num_tokens
    return GpuRun(path, model.config, options.prompts, table, *sizes)


def _ranks(tp: int | None) -> CommBackend | None:
    """This process's place under mpirun; None outside of it."""
    launcher = read_environment().launcher
    if launcher is None or launcher.size == 1:
        return None
    if tp is not None and tp != launcher.size:
        raise UserError(
            f"{tp} is not the {launcher.size} processes that mpirun started", where="--tp", fix="leave it out"
        )
    return MpiComm()


def _words(checkpoint: Path | None, max_new_tokens: int, prompts: list[str]) -> list[str]:
    words = ["--max-new-tokens", str(max_new_tokens)]
    words += [] if checkpoint is None else ["--checkpoint", str(checkpoint)]
    return words + [word for p in prompts for word in ("--prompt", p)]


def _document(result: DemoResult, model: Checkpoint, tp_size: int) -> dict[str, Any]:
    weave = describe(result.weave, result.seconds["build"])
    return {
        "model": model.source,
        "tp_size": tp_size,
        "identical": result.identical,
        "max_logit_diff": result.max_logit_diff,
        "logit_bound": result.logit_bound,
        "prompts": [asdict(row) for row in result.prompts],
        "split_steps": [asdict(step) | {"woven": step.woven} for step in result.split_steps],
        "sites": weave["sites"],
        "refused": weave["refused"],
        "seconds": result.seconds,
    }


def _said(mpi: dict[str, Any]) -> str:
    """The second run's verdict in words."""
    if "ranks" not in mpi:
        return str(mpi.get("skipped") or f"failed: {mpi['error']}")
    return "the same tokens from stock and woven" if mpi["identical"] else "OTHER tokens from stock and woven"


def _write(result: DemoResult, model: Checkpoint, options: DemoOptions, document: dict[str, Any], out: Path) -> Path:
    table = demo_table(model, options)
    steps = [step.num_tokens for step in result.split_steps if step.woven]
    boxes, edges = timeline(model.config, options.tp_size, table, max(steps, default=options.max_num_tokens))
    name = Path(model.source).stem
    title = f"{name}, tp_size {options.tp_size}: two layers of a step of {max(steps, default=0)} tokens"
    picture = draw_schedule(boxes, edges, title)
    backends = [f"{options.tp_size} ranks as threads of one process"]
    if document["mpi"] is not None:
        backends.append(f"mpirun, one process a rank: {_said(document['mpi'])}")
    plan = result.weave.plan
    page = DemoReport(
        model=name,
        tp_size=options.tp_size,
        num_layers=model.config.num_hidden_layers,
        sites=[SiteRow(i, s.kind.name.lower(), s.all_reduce, s.gamma, s.eps) for i, s in enumerate(plan.sites)],
        prompts=result.prompts,
        max_logit_diff=result.max_logit_diff,
        split_steps=result.split_steps,
        command=shlex.join(["trtllm-tokenweave", *sys.argv[1:]]),
        refused=[RefusedRow(r.where, r.reason) for r in plan.refused],
        dtype=model.config.dtype,
        backends=backends,
        limits=LIMITS,
        versions={
            "trtllm-tokenweave": __version__,
            "Python": platform.python_version(),
            "numpy": version("numpy"),
        },
        seconds=result.seconds,
    )
    write_picture(picture, out)
    return write_report(page, picture, out / "report.html")


def _print(document: dict[str, Any], result: DemoResult, options: DemoOptions) -> None:
    console = make_console()
    texts = Table("prompt", "woven network says", "same as stock", box=box.SIMPLE)
    for row in result.prompts:
        texts.add_row(escape(row.prompt), escape(row.text), "yes" if row.identical else "[bold red]NO[/bold red]")
    console.print(texts)
    title = f"Steps that were split (the demo's table: from {options.min_tokens} tokens)"
    steps = Table("step", "kind", "tokens", "sequences", "prefix", "suffix", box=box.SIMPLE, title=title)
    woven = [step for step in result.split_steps if step.woven]
    for step in woven:
        steps.add_row(*(str(v) for v in (step.step, step.kind, step.num_tokens, step.batch, step.prefix, step.suffix)))
    if woven:
        console.print(steps)
    for reason, count in Counter(r.reason for r in result.weave.plan.refused).items():
        console.print(f"left as it was ({count} times): {escape(reason)}")
    verdict = "[bold green]the same tokens[/]" if document["identical"] else "[bold red]OTHER tokens or logits[/]"
    console.print(
        f"{len(document['sites'])} sites fused; {len(woven)} of {len(result.split_steps)} steps split in two; stock "
        f"and woven networks generate {verdict}; largest logit difference {document['max_logit_diff']:.2g} "
        f"(bound {document['logit_bound']:.2g})"
    )
    if not woven:
        console.print("[bold yellow]No step was split: give more or longer prompts.[/]")
    if document["mpi"] is not None:
        console.print(f"under mpirun, one process a rank: {escape(_said(document['mpi']))}")
    for line in _gpu_lines(document["gpu"]):
        console.print(escape(line))
    if document["report"] is not None:
        console.print(f"report: {document['report']}")


def _gpu_lines(gpu: dict[str, Any] | None) -> list[str]:
    """What the run through TensorRT gave, in words."""
    if gpu is None:
        return []
    if "ranks" not in gpu:
        return [f"TensorRT: skipped: {gpu['skipped']}" if "skipped" in gpu else f"TensorRT: failed: {gpu['error']}"]
    lines = [
        f"TensorRT, {gpu['ranks']} GPU(s), bfloat16, {mode}: {engine['tokens_per_second']:.1f} tokens/s; steps: "
        + steps_said(engine)
        for mode, engine in gpu["engines"].items()
    ]
    if len(lines) > 1:
        lines.append(f"TensorRT: stock and woven engines say the same to {gpu['same']} of {gpu['of']} prompts")
    return lines


def _network(path: Path, as_json: bool) -> None:
    stock = load(path)
    woven = already_woven(stock)
    if woven is not None:
        fix = "save the network before it is woven (recorder.save): the demo weaves it, and compares both"
        raise UserError(f"is {woven}", where=str(path), fix=fix)
    table = network_table(stock, mapping_of(stock, path), granularity=16, min_tokens=12)
    check = check_network(stock, path, table)
    document = describe(check.weave, 0.0) | {
        "network": str(path),
        "identical": check.identical,
        "max_diff": check.max_diff,
        "relative_diff": check.relative_diff,
        "bound": check.bound,
        "skipped": check.skipped or None,
    }
    if as_json:
        print(json.dumps(document))
    else:
        console = make_console()
        for refusal in check.weave.plan.refused:
            console.print(f"{refusal.stage}: {escape(refusal.where)}: {escape(refusal.reason)}")
        console.print(f"{len(check.weave.plan.sites)} sites, mode {check.weave.mode}, checked edge by edge")
        if check.skipped:
            console.print(f"not run: {escape(check.skipped)}")
        else:
            verdict = "[bold green]equal but for rounding[/]" if check.identical else "[bold red]DIFFERENT[/]"
            console.print(
                f"stock and woven results are {verdict}: largest difference {check.max_diff:.2g}, "
                f"{check.relative_diff:.2g} of the largest value (bound {check.bound:.2g})"
            )
    if not check.identical:
        raise typer.Exit(1)
