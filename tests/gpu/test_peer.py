"""Ranks over peer memory, one process each: two, and four and eight, which take turns where there are fewer GPUs."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch

from gpu.mpirun import room_for
from gpu.oracle import Problem, Shape, exact_problem, random_problem
from gpu.runs import Variant, launch, place, run_and_check
from trtllm_tokenweave.bench.processes import Body, run_ranks
from trtllm_tokenweave.c_interface import RANKS_DISAGREE, TIMEOUT, LibraryError
from trtllm_tokenweave.native import AUTO, BULK, CP_ASYNC, CUDA_MEMORY, NCCL_MEMORY, PUSH, SOFT_MULTICAST, Group

MEGABYTE = 1 << 20
STRESS_ITERATIONS = int(os.environ.get("TOKENWEAVE_STRESS", "100000"))
TIMEOUT_MS = 1500
GPUS = torch.cuda.device_count()
#: Numbers of ranks.
SIZES = (2, 4, 8)
MEMORY = "TOKENWEAVE_SYMMETRIC_MEMORY"
needs_nccl = pytest.mark.skipif(
    torch.cuda.nccl.version() < (2, 29, 2) or not room_for(2),
    reason="PyTorch has loaded an NCCL before 2.29.2 (LD_PRELOAD another), or ranks may not share a GPU",
)


def limit_ms(size: int) -> int:
    """Time limit for tests that wait for it: also that of the meeting of ranks, which come one after another."""
    return TIMEOUT_MS * size // 2


def device_of(rank: int) -> torch.device:
    """Its own, or one that it shares."""
    return torch.device("cuda", rank % GPUS)


def make_group(rank: int, address: str, *, size: int = 2, owner: int | None = None, **fields: int) -> Group:
    """The group; its memory has the `owner`, by default the one that the environment asks for."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    sizes = {"tensor_bytes": 900 * MEGABYTE, "staging_bytes": 600 * MEGABYTE, "timeout_ms": 20000} | fields
    group = Group(size, rank=rank, device=device.index, bootstrap=address.encode(), allow_multicast=0, **sizes)
    if owner is None:
        owner = NCCL_MEMORY if os.environ.get(MEMORY) == "nccl" else CUDA_MEMORY
    info = group.info()
    assert info.memory == owner, info.memory_reason
    return group


def in_nccl_memory(rank: int, address: str, body: Body) -> Any:
    """What the body returns on symmetric memory that NCCL owns."""
    os.environ[MEMORY] = "nccl"
    return body(rank, address)


def checksum(tensor: torch.Tensor) -> int:
    """Equal for equal bytes, and for hardly anything else."""
    words = tensor.contiguous().view(torch.uint8).view(torch.int32).long()
    return int((words * (torch.arange(words.numel(), device=words.device).view(words.shape) % 1000003 + 1)).sum())


def correctness(rank: int, address: str, size: int = 2) -> list[int]:
    group = make_group(rank, address, size=size)
    device = device_of(rank)
    sums = []
    variants = [
        Variant(),
        Variant(in_place=False, residual_sharded=False, gather_residual=True),
        Variant(symmetric=False, in_place=False, ctas=16),
        Variant(symmetric=False, gather_residual=True),
        Variant(loader=CP_ASYNC, gather_residual=True),
        Variant(loader=BULK),
        Variant(loader=PUSH),
        Variant(loader=PUSH, symmetric=False, residual_sharded=False, gather_residual=True, ctas=8),
        Variant(fabric=SOFT_MULTICAST, ctas=8),
    ]
    sizes = [(1, 8), (3, 576), (64, 8192), (257, 5120), (1000, 4096), (19, 16384), (2048, 8192)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for variant in variants:
            for seed, (tokens, hidden) in enumerate(sizes):
                shape = Shape(size, tokens, hidden, dtype)
                with_bias = seed % 2 == 1
                run_and_check(group, exact_problem(shape, device, seed, with_bias=with_bias), variant, exact=True)
                run_and_check(group, random_problem(shape, device, seed, with_bias=with_bias), variant, exact=False)
    for hidden in (8192, 16384):
        for tokens, loader in ((8192, AUTO), (64, PUSH)):
            problem = random_problem(Shape(size, tokens, hidden, torch.bfloat16), device, 5, with_bias=False)
            tensors = [place(group, rank, problem, Variant(loader=loader))]
            torch.cuda.synchronize()
            launch(group, problem, Variant(loader=loader), tensors)
            torch.cuda.synchronize()
            sums.append(checksum(tensors[0].normed))
    group.close()
    return sums


def stress(rank: int, address: str, size: int = 2) -> int:
    """Iterations whose inputs change and whose ranks stall at random; returns how many gave a wrong value."""
    group = make_group(rank, address, size=size)
    device = device_of(rank)
    stalls = random.Random(rank)
    shared = random.Random(99)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    cases = []
    for tokens, variant in (
        (64, Variant(in_place=False, ctas=16)),
        (333, Variant(in_place=False, ctas=32)),
        (7, Variant(symmetric=False, in_place=False, ctas=3)),
        (129, Variant(loader=CP_ASYNC, in_place=False, ctas=20)),
        (200, Variant(symmetric=False, in_place=False, ctas=8)),
        (64, Variant(loader=PUSH, in_place=False)),
        (7, Variant(loader=PUSH, symmetric=False, in_place=False, ctas=3)),
    ):
        for seed in range(3):
            problem = exact_problem(Shape(size, tokens, 2048, torch.bfloat16), device, seed, with_bias=False)
            total = problem.inputs.double().sum(0) + problem.residual.double()
            normed = (total.sign() * problem.weight.double()).to(torch.bfloat16)
            cases.append((problem, variant, normed, total[problem.shard(rank)].to(torch.bfloat16)))
    placed = [place(group, rank, problem, variant) for problem, variant, _, _ in cases]
    for iteration in range(STRESS_ITERATIONS if size <= GPUS else STRESS_ITERATIONS // 100):
        chosen = shared.randrange(len(cases))
        problem, variant, normed, residual = cases[chosen]
        tensors = placed[chosen]
        # The three problems of a size share their symmetric memory: stale data would show.
        tensors.input.copy_(problem.inputs[rank])
        if stalls.random() < 0.02:
            torch.cuda._sleep(stalls.randrange(1, 200000))
        launch(group, problem, variant, [tensors])
        wrong += (tensors.normed != normed).any()
        wrong += (tensors.residual_out[: residual.shape[0]] != residual).any()
        if iteration % 500 == 0:
            torch.cuda.synchronize()
            group.check()
    torch.cuda.synchronize()
    group.check()
    result = int(wrong)
    group.close()
    return result


def expect_fault(group: Group, problem: Problem, variant: Variant, code: int, words: str) -> float:
    """Queues a call that cannot end; returns the seconds until the group said so."""
    tensors = [place(group, group.rank, problem, variant)]
    torch.cuda.synchronize()
    start = time.monotonic()
    launch(group, problem, variant, tensors)
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    for attempt in (group.check, lambda: launch(group, problem, variant, tensors)):
        with pytest.raises(LibraryError, match=words) as caught:
            attempt()
        assert caught.value.code == code
    assert bool(torch.isnan(tensors[0].normed).all()), "the output was not poisoned"
    assert bool(torch.isnan(tensors[0].residual_out).all()), "the residual was not poisoned"
    return seconds


def killed(rank: int, address: str, variant: Variant, size: int = 2) -> float:
    group = make_group(rank, address, size=size, timeout_ms=limit_ms(size))
    problem = exact_problem(Shape(size, 256, 4096, torch.bfloat16), device_of(rank), 0, with_bias=False)
    for _ in range(10):
        run_and_check(group, problem, variant, exact=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    seconds = expect_fault(group, problem, variant, TIMEOUT, f"rank {rank} with rank 1 at the start of a call")
    with pytest.raises(LibraryError, match="rank 1"):
        group.close()
    return seconds


def lost(rank: int, address: str) -> float:
    """Rank 1 dies and the kernel of rank 0 takes its CUDA context along; returns the seconds that it took to leave."""
    group = make_group(rank, address, timeout_ms=TIMEOUT_MS, trap_on_fault=1)
    problem = exact_problem(Shape(2, 256, 4096, torch.bfloat16), device_of(rank), 0, with_bias=False)
    run_and_check(group, problem, Variant(), exact=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tensors = [place(group, rank, problem, Variant())]
    launch(group, problem, Variant(), tensors)
    with pytest.raises(RuntimeError):
        torch.cuda.synchronize()
    start = time.monotonic()
    with pytest.raises(LibraryError):
        group.close()
    return time.monotonic() - start


def disagreement(rank: int, address: str, variants: tuple[Variant, Variant], tokens: tuple[int, int]) -> float:
    group = make_group(rank, address, timeout_ms=TIMEOUT_MS)
    device = device_of(rank)
    problem = exact_problem(Shape(2, tokens[rank], 4096, torch.bfloat16), device, 0, with_bias=False)
    words = f"rank {rank} with rank {1 - rank} at the start of a call"
    seconds = expect_fault(group, problem, variants[rank], RANKS_DISAGREE, words)
    group.close()
    return seconds


def late(rank: int, address: str) -> None:
    """Rank 1 owns no row of the call and gives up on it, another one queued behind it; then rank 0 comes."""
    group = make_group(rank, address, timeout_ms=TIMEOUT_MS)
    device = device_of(rank)
    shape = Shape(2, 1, 4096, torch.bfloat16)
    first, second = (exact_problem(shape, device, seed, with_bias=False) for seed in (0, 1))
    variant = Variant(loader=PUSH, symmetric=False, in_place=False)
    run_and_check(group, first, variant, exact=True)
    if rank == 0:
        time.sleep(2 * TIMEOUT_MS / 1000)
        run_and_check(group, first, variant, exact=True)
    else:
        placed = [(problem, place(group, rank, problem, variant)) for problem in (first, second)]
        torch.cuda.synchronize()
        for problem, tensors in placed:
            launch(group, problem, variant, [tensors])
        torch.cuda.synchronize()
        with pytest.raises(LibraryError, match="rank 1 with rank 0 at the start of a call"):
            group.check()
    group.close()


def asked_by_one(rank: int, address: str) -> bytes:
    """Only rank 0 asks for NCCL's memory; returns why there is none."""
    if rank == 0:
        os.environ[MEMORY] = "nccl"
    group = make_group(rank, address, owner=CUDA_MEMORY)
    problem = exact_problem(Shape(2, 64, 4096, torch.bfloat16), device_of(rank), 0, with_bias=False)
    run_and_check(group, problem, Variant(), exact=True)
    reason = bytes(group.info().memory_reason)
    group.close()
    return reason


@pytest.mark.parametrize("size", SIZES)
def test_values(size: int) -> None:
    first, *others = run_ranks(partial(correctness, size=size), size=size)
    assert all(other == first for other in others), "the ranks hold different results"


@needs_nccl
def test_values_in_memory_of_nccl() -> None:
    first, second = run_ranks(partial(in_nccl_memory, body=correctness))
    assert first == second, "the ranks hold different results"
    assert first == run_ranks(correctness)[0], "the owner of the memory changes results"


@needs_nccl
def test_stalled_ranks_give_no_wrong_value_in_memory_of_nccl() -> None:
    assert run_ranks(partial(in_nccl_memory, body=stress), timeout=400) == [0, 0]


@needs_nccl
def test_a_killed_rank_is_a_timeout_on_the_other_in_memory_of_nccl() -> None:
    seconds, died = run_ranks(partial(in_nccl_memory, body=partial(killed, variant=Variant(in_place=False))))
    assert died is None
    assert TIMEOUT_MS / 1000 * 0.9 < seconds < TIMEOUT_MS / 1000 + 1


@needs_nccl
def test_a_group_whose_device_is_lost_ends_in_memory_of_nccl() -> None:
    seconds, died = run_ranks(partial(in_nccl_memory, body=lost))
    assert died is None
    assert seconds < 2 * TIMEOUT_MS / 1000 + 1


@needs_nccl
def test_all_ranks_do_without_nccl_where_one_does_not_ask() -> None:
    assert run_ranks(asked_by_one) == [b"rank 1: TOKENWEAVE_SYMMETRIC_MEMORY is not nccl", b""]


@pytest.mark.parametrize("size", SIZES)
def test_stalled_ranks_give_no_wrong_value(size: int) -> None:
    assert run_ranks(partial(stress, size=size), size=size, timeout=400) == [0] * size


LOADERS = [Variant(loader=loader, in_place=False) for loader in (AUTO, BULK, PUSH)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", LOADERS, ids=lambda v: str(v.loader))
def test_a_killed_rank_is_a_timeout_on_the_others(variant: Variant, size: int) -> None:
    first, died, *others = run_ranks(partial(killed, variant=variant, size=size), size=size)
    assert died is None
    for seconds in (first, *others):
        assert limit_ms(size) / 1000 * 0.9 < seconds < limit_ms(size) / 1000 + 1


def test_calls_queued_behind_a_fault_reach_no_rank_that_is_late() -> None:
    run_ranks(late)


@pytest.mark.parametrize("variant", LOADERS, ids=lambda v: str(v.loader))
def test_ranks_that_make_different_calls_both_learn_it(variant: Variant) -> None:
    assert all(
        seconds < 1 for seconds in run_ranks(partial(disagreement, variants=(variant, variant), tokens=(256, 255)))
    )


def test_ranks_with_different_loaders_both_learn_it() -> None:
    ctas = [dataclasses.replace(variant, ctas=16) for variant in LOADERS]
    run = partial(disagreement, variants=(ctas[1], ctas[2]), tokens=(256, 256))
    assert all(seconds < 1 for seconds in run_ranks(run))
