"""`trtllm-tokenweave plan`: what steps of given sizes would do, and the waves or the time that this costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from trtllm_tokenweave.cli.console import make_console, print_whole
from trtllm_tokenweave.cli.table import option_key, print_json, read_tokens
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.model_config import preset as model_preset
from trtllm_tokenweave.schedule import SplitPlan, find_row
from trtllm_tokenweave.table import TuningTable
from trtllm_tokenweave.table.measured import Here
from trtllm_tokenweave.table.shipped import choose_table
from trtllm_tokenweave.waves import (
    DEFAULT_SMS,
    MAX_SMS,
    GemmShape,
    GemmWaves,
    SplitSeed,
    WaveModel,
    default_table,
    gemm_shapes,
    plan_waves,
    seed_offsets,
    table_key,
)

DEFAULT_TOKENS = "1,256,512,1024,1536,2048,3072,4096,8192,16384"


@dataclass(frozen=True)
class PlannedStep:
    """One step: its plan, the waves of its GEMMs, and the offset that wave arithmetic would try first (or None)."""

    plan: SplitPlan
    waves: tuple[GemmWaves, ...]
    seed: SplitSeed | None


def plan(
    preset: Annotated[str, typer.Option(help="Model shape, such as llama-3.3-70b.")],
    tp: Annotated[int, typer.Option(min=1, help="tp_size.")] = 8,
    table: Annotated[Path | None, typer.Option(metavar="FILE", help="Tuning table; default: the default rule.")] = None,
    tokens: Annotated[str, typer.Option(metavar="N,N...", help="Token counts of the steps.")] = DEFAULT_TOKENS,
    batch: Annotated[int, typer.Option(help="Sequences of the steps.")] = 1,
    sms: Annotated[int, typer.Option(help="SMs of the GPU.")] = DEFAULT_SMS,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU whose shipped table to take, such as 'NVIDIA H200'.")
    ] = None,
    predict: Annotated[bool, typer.Option("--predict", help="Predict times instead of counting waves.")] = False,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --predict: h200-peer (the default) or h100-multimem.")
    ] = None,
    gemm: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --predict: GEMM curves of bench gemm for the machine's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the split of each step size and the waves of each GEMM, whole and in either half, or predicted times.

    A prediction looks for the best split itself: of a table it takes whose GEMMs run beside collectives.

    Steps of fewer tokens than --batch are left out: every sequence of a step has at least one token.
    """
    config = model_preset(preset)
    shapes = gemm_shapes(config, tp)
    counts = read_tokens(tokens)
    if batch < 1:
        raise UserError(f"{batch} is below 1", where="--batch", fix="give the number of sequences")
    if not 1 <= sms <= MAX_SMS:
        raise UserError(f"{sms} is outside of 1..{MAX_SMS}", where="--sms", fix="give the GPU's SM count")
    skipped = tuple(count for count in counts if count < batch)
    if len(skipped) == len(counts):
        raise UserError(
            f"{batch} sequences need at least {batch} tokens, and no step has as many",
            where="--batch",
            fix="raise --tokens or lower --batch",
        )
    if predict:
        if sms != DEFAULT_SMS:
            raise UserError("takes a machine that has its SMs", where="--predict", fix="leave out --sms")
        # A quarter of a second of imports that counting waves needs none of.
        from trtllm_tokenweave.cli.predict import make_prediction
        from trtllm_tokenweave.predict import Workload

        served = tuple(count for count in counts if count >= batch)
        gemms = _table(config, tp, sms, table, gpu)[0].gemm
        prediction = make_prediction(preset, Workload(config, tp, batch), machine, gemm, served, gemms)
        name = prediction.predictor.machine.name
        notes = [] if gpu is None else [f"--gpu says whose table is taken; times are those of {name} (--machine)"]
        if as_json:
            document = prediction.document()
            print_json({**document, "notes": [*notes, *document["notes"]], "skipped": list(skipped)})
        else:
            console = make_console()
            prediction.show(console)
            for note in notes:
                console.print(f"note: {note}", markup=False, highlight=False)
            _print_skipped(console, skipped, batch)
        return
    if machine is not None or gemm is not None:
        option = "--machine" if machine is not None else "--gemm"
        raise UserError("says what a prediction starts from", where=option, fix="add --predict")
    tuning, said = _table(config, tp, sms, table, gpu)
    steps = [plan_one(tuning, shapes, batch, count, sms) for count in counts if count >= batch]
    if tp == 1:
        steps, said = [], "tp_size 1: one rank has nothing to communicate, so nothing is fused or split: mode stock"
    if as_json:
        document = {
            "model": {"preset": preset, "tp_size": tp, "hidden_size": config.hidden_size, "kind": config.kind},
            "sms": sms,
            "table": _table_document(tuning, table) | {"said": said},
            "steps": [_step_document(step) for step in steps],
            "skipped": list(skipped),
        }
        print_json(document)
        return
    console = make_console()
    if steps:
        _print_steps(console, steps, tuning, f"{preset}, tp_size {tp}, batch {batch}, {sms} SMs")
    console.print(said, markup=False, highlight=False)
    _print_skipped(console, skipped, batch)


def _table(config: ModelConfig, tp: int, sms: int, given: Path | None, gpu: str | None) -> tuple[TuningTable, str]:
    """The table of the steps, and which it is in words.

    Raises:
        UserError: The table was made for something else, or no GPU is called as --gpu says.
    """
    if given is None and gpu is None:
        rule = default_table(config, tp, sms=sms)
        return rule, f"table: {rule.source.kind}, {rule.source.text}"
    if gpu is not None:
        option_key(table_key(config, tp).model_dump() | {"gpu": gpu})
    chosen = choose_table(config, tp, Here(gpu), given=given)
    return chosen.table, chosen.said


def plan_one(table: TuningTable, shapes: tuple[GemmShape, ...], batch: int, num_tokens: int, sms: int) -> PlannedStep:
    """Plan one step and count its waves.

    Raises:
        UserError: The collectives leave no SMs.
    """
    split = table.lookup(batch, num_tokens)
    # Nothing runs beside the GEMMs of a step that is not split, however many CTAs its row gives to the collectives.
    model = WaveModel(split.attention, split.mlp, sms=sms) if split.suffix else WaveModel(sms=sms)
    seeds = seed_offsets(shapes, model, num_tokens, granularity=table.granularity) if split.suffix else ()
    return PlannedStep(split, plan_waves(split, shapes, model), seeds[0] if seeds else None)


def _table_document(table: TuningTable, file: Path | None) -> dict[str, Any]:
    return {
        "file": None if file is None else str(file),
        "sha256": table.sha256,
        "granularity": table.granularity,
        "min_tokens": table.min_tokens,
        "source": table.source.model_dump(mode="json"),
    }


def _step_document(step: PlannedStep) -> dict[str, Any]:
    split = step.plan
    return {
        "num_tokens": split.num_tokens,
        "batch": split.batch,
        "mode": split.mode,
        "split": split.split,
        "prefix": split.prefix,
        "suffix": split.suffix,
        "source": split.source,
        "reason": split.reason,
        "seed_offset": None if step.seed is None else step.seed.offset,
        "attention": split.attention.model_dump(mode="json"),
        "mlp": split.mlp.model_dump(mode="json"),
        "gemms": [
            {
                "name": waves.shape.name,
                "n": waves.shape.n,
                "k": waves.shape.k,
                "groups": waves.shape.groups,
                "whole": waves.whole,
                "prefix": waves.prefix,
                "suffix": waves.suffix,
            }
            for waves in step.waves
        ],
    }


def _print_skipped(console: Console, skipped: tuple[int, ...], batch: int) -> None:
    if skipped:
        sizes = ", ".join(map(str, skipped))
        console.print(f"left out, fewer tokens than the {batch} sequences: {sizes}", highlight=False)


def _print_steps(console: Console, steps: list[PlannedStep], table: TuningTable, title: str) -> None:
    # The last word of a layer's name is enough beside its neighbours, and eight columns then fit into 80 characters.
    names = [waves.shape.name.rpartition(".")[2] for waves in steps[0].waves]
    view = Table(
        "tokens", "mode", "halves", "CTAs", *names, "seed", title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    view.show_edge = False
    for column in view.columns:
        column.no_wrap = True
    for step in steps:
        split = step.plan
        halves = f"{split.prefix}+{split.suffix}" if split.suffix else str(split.prefix)
        cells = [f"{w.whole}:{w.prefix}+{w.suffix}" if split.suffix else str(w.whole) for w in step.waves]
        seed = "-" if step.seed is None else str(step.seed.offset)
        # A collective that runs alone takes the kernel's own number, unless a row says "fuse".
        row = find_row(table, split.batch, split.num_tokens)
        own = not split.suffix and (row is None or row.mode == "weave")
        ctas = "own" if own else f"{split.attention.ctas}/{split.mlp.ctas}"
        view.add_row(str(split.num_tokens), split.mode, halves, ctas, *cells, seed)
    print_whole(console, view)
    console.print(
        "CTAs: of the attention/MLP collective; own: the kernel's choice. GEMMs: waves of the whole step, then of the "
        "prefix+suffix on the SMs left. Seed: the offset that wave arithmetic would try first.",
        highlight=False,
    )
    unserved = [str(step.plan.num_tokens) for step in steps if step.plan.source == "default"]
    if table.rows and unserved:
        console.print(f"no row of the table fits {', '.join(unserved)} tokens: default rule", highlight=False)
