"""AllReduceRmsNorm among virtual ranks on one GPU: `trtllm-tokenweave bench loopback`.

All ranks' memory is the GPU's own, so that no link is a limit: what is left is what the SMs of few CTAs can do, by
loader, number of ranks and CTAs, and with many CTAs the GPU's memory. Each candidate is verified first; times are
medians of device events around the one cooperative kernel of all ranks, in microseconds.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import sys
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_tokenweave.bench.kernel import (
    DTYPE,
    EPS,
    LOADERS,
    check_error,
    command,
    machine,
    normalised,
    relative_error,
)
from trtllm_tokenweave.bench.timing import Operation, time_all
from trtllm_tokenweave.c_interface import UNSUPPORTED, LibraryError
from trtllm_tokenweave.config import prepare_benchmark
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.native import Call, Group, LaunchConfig, RankTensors

ITERATIONS = 10
TIMEOUT_MS = 5000


@dataclass(frozen=True)
class LoopbackBench:
    """What to measure: numbers of ranks, hidden sizes, token counts, loaders (of LOADERS) and CTAs a rank."""

    ranks: tuple[int, ...]
    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    loaders: tuple[str, ...]
    ctas: tuple[int, ...]


def place(group: Group, tokens: int, hidden: int) -> list[RankTensors]:
    """Random tensors of every rank, each rank's own rows of the residual, input and normed in symmetric memory."""
    num_bytes, rows = tokens * hidden * DTYPE.itemsize, -(-tokens // group.size)
    made = []
    for rank in range(group.size):
        source, normed = (group.tensor(rank, (tokens, hidden), DTYPE, at) for at in (0, num_bytes))
        source.normal_()
        residual = torch.randn(rows, hidden, device=source.device).to(DTYPE)
        made.append(RankTensors(source, residual, normed, torch.empty_like(residual)))
    return made


def verify(group: Group, tensors: list[RankTensors], call: Call, run: Operation, name: str) -> None:
    """Run once and compare every rank's result with fp32.

    Raises:
        AssertionError: one differs.
    """
    tokens = tensors[0].input.shape[0]
    total = torch.cat([t.residual for t in tensors])[:tokens].float() + sum(t.input.float() for t in tensors)
    want = normalised(total, call)
    for t in tensors:
        t.normed.fill_(float("nan"))
    run(0)
    torch.cuda.synchronize()
    group.check()
    for rank, t in enumerate(tensors):
        check_error(relative_error(t.normed, want), f"{name}, rank {rank}", t)


def measure_rows(group: Group, hidden: int, tokens: int, arguments: LoopbackBench) -> list[dict[str, Any]]:
    """A row for each loader and number of CTAs that the library takes."""
    call = Call((1 + 0.1 * torch.randn(hidden, device="cuda")).to(DTYPE), None, EPS)
    tensors = place(group, tokens, hidden)
    operations: dict[str, Operation] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for loader, ctas in itertools.product(arguments.loaders, arguments.ctas):
        queue = group.prepare(call, tensors, LaunchConfig(loader=LOADERS[loader], ctas=ctas))

        def run(_: int, queue: Any = queue) -> None:
            queue()

        name = f"{group.size} ranks, {loader}, {ctas} CTAs"
        try:
            verify(group, tensors, call, run, name)
        except LibraryError as error:
            if error.code != UNSUPPORTED:
                raise
            print(f"{name}: {error}", file=sys.stderr)
            continue
        operations[name] = run
        kinds[name] = {
            "ranks": group.size,
            "hidden": hidden,
            "num_tokens": tokens,
            "loader": loader,
            "ctas": ctas,
        }
    rows = []
    for name, us in time_all(operations, lambda _: None, ITERATIONS).items():
        rows.append({**kinds[name], "us": us})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def measure_loopback(arguments: LoopbackBench) -> dict[str, Any]:
    """Measure on one GPU of this machine; returns the JSON document."""
    prepare_benchmark()
    torch.cuda.set_device(0)
    rows = []
    for ranks, hidden in itertools.product(arguments.ranks, arguments.hidden):
        num_bytes = 2 * max(arguments.tokens) * hidden * DTYPE.itemsize
        with closing(Group(ranks, loopback=1, tensor_bytes=num_bytes, timeout_ms=TIMEOUT_MS)) as group:
            for tokens in arguments.tokens:
                rows += measure_rows(group, hidden, tokens, arguments)
    if not rows:
        raise UserError("the kernel takes none of these on this GPU", where="bench loopback", fix="give fewer CTAs")
    return {
        "what": "AllReduceRmsNorm among virtual ranks of one GPU, us: medians of device events; ctas: of each rank",
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "command": command(),
        "machine": machine(),
        "dtype": "bfloat16",
        "rows": rows,
    }
