"""`trtllm-tokenweave demo`: a real model, stock and woven, side by side."""

from __future__ import annotations

import importlib.util
import json
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_tokenweave import __version__
from trtllm_tokenweave.checkpoint import Checkpoint, open_checkpoint, smollm2_gguf
from trtllm_tokenweave.cli.inspect import describe, mapping_of, network_table
from trtllm_tokenweave.comm import CommBackend, MpiComm
from trtllm_tokenweave.config import mpi_environment, read_environment
from trtllm_tokenweave.demo import DemoOptions, DemoResult, check_network, run_demo
from trtllm_tokenweave.demo.model import demo_table
from trtllm_tokenweave.demo.timeline import timeline
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.picture import draw_schedule
from trtllm_tokenweave.recorder import get_plugin_registry, store
from trtllm_tokenweave.report import DemoReport, RefusedRow, SiteRow, write_picture, write_report

LIMITS = (
    "The networks run on a numpy interpreter of TensorRT's object model: what is shown is that the woven network "
    "computes the same, not how fast it is.",
    "The threshold is lowered so that steps of a few dozen tokens split; by default dense models split from 1024.",
    "Sums are made in rank order, so results repeat; on GPUs the order of additions may differ.",
)
_MPI_SECONDS = 300


def demo(
    tp: Annotated[int, typer.Option(help="Ranks.")] = 3,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="GGUF file, Hugging Face or TensorRT-LLM folder; default: SmolLM2-135M."),
    ] = None,
    network: Annotated[Path | None, typer.Option(help="Weave and check this recorded network instead.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt, may be repeated; default: six of them.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.")] = DemoOptions.max_new_tokens,
    mpi: Annotated[bool, typer.Option(help="Run again under mpirun, one process a rank, where there is MPI.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the report.")] = Path("demo_report"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Weave a real Llama, run it beside the stock network, and show that both say the same."""
    if network is not None:
        _network(network, as_json)
        return
    launcher = read_environment().launcher
    comm: CommBackend | None = None
    if launcher is not None and launcher.size > 1:
        comm, tp, mpi = MpiComm(), launcher.size, False
    leader = comm is None or comm.rank == 0
    console = Console(stderr=True, quiet=not leader)
    options = DemoOptions(tp_size=tp, max_new_tokens=max_new_tokens)
    if prompt:
        options = DemoOptions(tp_size=tp, max_new_tokens=max_new_tokens, prompts=tuple(prompt))
    model = open_checkpoint(checkpoint if checkpoint is not None else smollm2_gguf(), dtype="float32")
    try:
        result = run_demo(model, options, lambda line: console.print(escape(line), style="dim"), comm)
    except TokenWeaveError as error:
        if isinstance(comm, MpiComm):
            # The other ranks wait for this one: say why, and take them down now rather than after their time-out.
            print(f"error: rank {comm.rank}: {error}", file=sys.stderr, flush=True)
            comm.abort(2 if isinstance(error, UserError) else 1)
        raise
    if not leader:
        return
    document = _document(result, model, tp)
    document["mpi"] = _under_mpi(tp, checkpoint, max_new_tokens, prompt or [], console) if mpi else None
    document["report"] = None
    if comm is None:
        document["report"] = str(_write(result, model, options, document, out))
    if as_json:
        print(json.dumps(document))
    else:
        _print(document, result)
    if not document["identical"] or (document["mpi"] or {}).get("identical") is False:
        raise typer.Exit(1)


def _document(result: DemoResult, model: Checkpoint, tp_size: int) -> dict[str, Any]:
    weave = describe(result.weave, result.seconds["build"])
    return {
        "model": model.source,
        "tp_size": tp_size,
        "identical": result.identical,
        "max_logit_diff": result.max_logit_diff,
        "prompts": [asdict(row) for row in result.prompts],
        "split_steps": [asdict(step) | {"woven": step.woven} for step in result.split_steps],
        "sites": weave["sites"],
        "refused": weave["refused"],
        "seconds": result.seconds,
    }


def _under_mpi(
    tp: int, checkpoint: Path | None, max_new_tokens: int, prompts: list[str], console: Console
) -> dict[str, Any]:
    """Run the demo again with one process a rank; returns its verdict, or why it was not run."""
    mpirun = shutil.which("mpirun")
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        lack = "mpirun" if mpirun is None else "mpi4py"
        return {"skipped": f"{lack} is not installed: install Open MPI and the extra 'mpi'"}
    command = [mpirun, "-n", str(tp), sys.executable, "-m", "trtllm_tokenweave.cli.app", "demo", "--json", "--no-mpi"]
    command += ["--max-new-tokens", str(max_new_tokens)]
    command += [] if checkpoint is None else ["--checkpoint", str(checkpoint)]
    command += [word for p in prompts for word in ("--prompt", p)]
    console.print(f"running again under mpirun -n {tp}", style="dim")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_MPI_SECONDS, env=mpi_environment(), check=False
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"identical": False, "error": f"no answer within {_MPI_SECONDS} s"}
    except (ValueError, IndexError):
        words = done.stderr.strip().splitlines() or [f"mpirun ended with code {done.returncode}"]
        return {"identical": False, "error": words[-1]}
    if "error" in found:
        return {"identical": False, "error": found["error"]["what"]}
    return {"ranks": tp, "identical": found["identical"], "max_logit_diff": found["max_logit_diff"]}


def _write(result: DemoResult, model: Checkpoint, options: DemoOptions, document: dict[str, Any], out: Path) -> Path:
    table = demo_table(model, options)
    steps = [step.num_tokens for step in result.split_steps if step.woven]
    boxes, edges = timeline(model.config, options.tp_size, table, max(steps, default=options.max_num_tokens))
    name = Path(model.source).stem
    title = f"{name}, tp_size {options.tp_size}: two layers of a step of {max(steps, default=0)} tokens"
    picture = draw_schedule(boxes, edges, title)
    write_picture(picture, out)
    backends = [f"{options.tp_size} ranks as threads of one process"]
    verdict = document["mpi"] or {}
    if "ranks" in verdict:
        same = "the same tokens" if verdict["identical"] else "OTHER tokens"
        backends.append(f"mpirun -n {verdict['ranks']}: {same} from stock and woven")
    elif verdict:
        backends.append(f"mpirun: {verdict.get('skipped') or verdict.get('error')}")
    plan = result.weave.plan
    report = DemoReport(
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
    return write_report(report, picture, out / "report.html")


def _print(document: dict[str, Any], result: DemoResult) -> None:
    console = Console()
    texts = Table("prompt", "woven network says", "same as stock", box=box.SIMPLE)
    for row in result.prompts:
        texts.add_row(escape(row.prompt), escape(row.text), "yes" if row.identical else "[bold red]NO[/bold red]")
    console.print(texts)
    steps = Table("step", "kind", "tokens", "sequences", "prefix", "suffix", box=box.SIMPLE, title="Split per step")
    for step in result.split_steps:
        steps.add_row(*(str(v) for v in (step.step, step.kind, step.num_tokens, step.batch, step.prefix, step.suffix)))
    console.print(steps)
    woven = sum(step.woven for step in result.split_steps)
    verdict = "[bold green]the same tokens[/]" if document["identical"] else "[bold red]OTHER tokens[/]"
    console.print(
        f"{len(document['sites'])} sites fused; {woven} of {len(result.split_steps)} steps split in two; stock and "
        f"woven networks generate {verdict}; largest logit difference {document['max_logit_diff']:.2g}"
    )
    mpi = document["mpi"]
    if mpi is not None:
        said = mpi.get("skipped") or mpi.get("error")
        said = said or ("the same tokens" if mpi["identical"] else "OTHER tokens")
        console.print(f"under mpirun, one process a rank: {escape(said)}")
    if document["report"] is not None:
        console.print(f"report: {document['report']}")


def _network(path: Path, as_json: bool) -> None:
    mapping = mapping_of(store.load(path, get_plugin_registry()), path)
    if mapping.tp_size < 2:
        raise UserError(
            "its AllReduce layers have one rank", where=str(path), fix="record a network of tp_size 2 or more"
        )
    check = check_network(path, lambda n: network_table(n, mapping, granularity=16, min_tokens=12), mapping.tp_size)
    document = describe(check.weave, 0.0) | {
        "network": str(path),
        "identical": check.identical,
        "max_diff": check.max_diff,
        "relative_diff": check.relative_diff,
        "skipped": check.skipped or None,
    }
    if as_json:
        print(json.dumps(document))
    else:
        console = Console()
        for refusal in check.weave.plan.refused:
            console.print(f"{refusal.stage}: {escape(refusal.where)}: {escape(refusal.reason)}")
        moved = check.skipped or f"largest difference {check.max_diff:.2g} ({check.relative_diff:.2g} relative)"
        console.print(
            f"{len(check.weave.plan.sites)} sites, mode {check.weave.mode}; stock against woven: {escape(moved)}"
        )
    if not check.identical:
        raise typer.Exit(1)
