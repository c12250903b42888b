"""All ranks on one GPU: the same kernel as between GPUs, and the arithmetic of multimem in software."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from gpu.oracle import Shape, exact_problem, random_problem
from gpu.runs import Variant, launch, place, run_and_check
from trtllm_tokenweave.c_interface import INVALID_ARGUMENT, RANKS_DISAGREE, UNSUPPORTED, LibraryError
from trtllm_tokenweave.native import (
    AUTO,
    BULK,
    CP_ASYNC,
    MULTIMEM,
    PEER,
    PUSH,
    SOFT_MULTICAST,
    Call,
    Group,
    LaunchConfig,
    RankTensors,
)

DEVICE = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MEGABYTE = 1 << 20


@pytest.fixture(params=[1, 2, 3, 4, 8])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    size: int = request.param
    made = Group(size, loopback=1, tensor_bytes=640 * MEGABYTE, staging_bytes=512 * MEGABYTE, timeout_ms=5000)
    yield made
    made.close()


VARIANTS = [
    Variant(),
    Variant(in_place=False, residual_sharded=False),
    Variant(gather_residual=True, in_place=False),
    Variant(symmetric=False, in_place=False),
    Variant(symmetric=False, residual_sharded=False, gather_residual=True),
    Variant(loader=CP_ASYNC),
    Variant(loader=CP_ASYNC, symmetric=False, in_place=False, gather_residual=True, ctas=2),
    Variant(ctas=3, threads=600),
    Variant(loader=PUSH),
    Variant(loader=PUSH, in_place=False, residual_sharded=False, ctas=3),
    Variant(loader=PUSH, symmetric=False, gather_residual=True),
    Variant(loader=PUSH, symmetric=False, in_place=False, ctas=1, threads=600),
    Variant(fabric=SOFT_MULTICAST),
    Variant(fabric=SOFT_MULTICAST, symmetric=False, gather_residual=True, ctas=5),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: str(VARIANTS.index(v)))
def test_every_variant(group: Group, variant: Variant, dtype: torch.dtype) -> None:
    for seed, (tokens, hidden) in enumerate([(1, 8), (5, 576), (33, 4096), (257, 5120), (64, 8192), (19, 16384)]):
        if dtype == torch.float32 and hidden == 16384 and variant.threads:
            continue  # one row takes 1024 threads
        shape = Shape(group.size, tokens, hidden, dtype)
        with_bias = seed % 2 == 1
        run_and_check(group, exact_problem(shape, DEVICE, seed, with_bias=with_bias), variant, exact=True)
        run_and_check(group, random_problem(shape, DEVICE, seed, with_bias=with_bias), variant, exact=False)


@pytest.mark.parametrize("loader", [AUTO, CP_ASYNC, PUSH])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_counts(group: Group, dtype: torch.dtype, loader: int) -> None:
    counts = [0, 1, 2, 3, 7, 8, 9, 127, 1000, 2048]
    for seed, (tokens, symmetric) in enumerate(itertools.product(counts, [True, False])):
        problem = exact_problem(Shape(group.size, tokens, 1024, dtype), DEVICE, seed, with_bias=False)
        run_and_check(group, problem, Variant(symmetric=symmetric, in_place=False, loader=loader), exact=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_push_after_calls_of_any_size(group: Group, dtype: torch.dtype) -> None:
    """What a call leaves in the mailbox, the next but two must not take for its own; other loaders run in between."""
    tokens = [40, 1, 90, 90, 3, 64, 2, 8, 128, 17, 17, 17, 5]
    loaders = [PUSH, PUSH, PUSH, CP_ASYNC, PUSH, PUSH, BULK, PUSH, PUSH, PUSH, AUTO, PUSH, PUSH]
    for seed, (count, loader) in enumerate(zip(tokens, loaders, strict=True)):
        problem = exact_problem(Shape(group.size, count, 1024 + 8 * seed, dtype), DEVICE, seed, with_bias=False)
        gather = seed % 3 == 0
        run_and_check(group, problem, Variant(loader=loader, ctas=1 + seed % 7, gather_residual=gather), exact=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bits_may_be_data(group: Group, dtype: torch.dtype) -> None:
    """NaN of any payload, infinities, -0: the push loader's mark of an empty word is a NaN too."""
    problem = random_problem(Shape(group.size, 24, 2048, dtype), DEVICE, 7, with_bias=False)
    words = problem.inputs.view(torch.int32)
    random = torch.Generator(DEVICE).manual_seed(1)
    chosen = torch.randint(0, 40, words.shape, device=DEVICE, generator=random)
    words[chosen == 0] = -1
    words[chosen == 1] = 0x7FFFFFFF
    words[chosen == 2] = -(1 << 31)
    problem.inputs[:, 12:] = 1.0
    problem.inputs[:, 13, ::3] = -0.0
    problem.residual[13] = -0.0
    results = []
    for loader in (CP_ASYNC, PUSH) if group.size > 1 else (CP_ASYNC,):
        variant = Variant(loader=loader, symmetric=False, in_place=False)
        tensors = [place(group, rank, problem, variant) for rank in range(group.size)]
        torch.cuda.synchronize()
        launch(group, problem, variant, tensors)
        torch.cuda.synchronize()
        group.check()
        results.append(tensors)
    assert bool(torch.isnan(results[0][0].normed[:12]).any())
    assert not bool(torch.isnan(results[0][0].normed[12:]).any())
    for t, other in zip(results[0], results[-1], strict=True):
        assert torch.equal(t.residual_out.nan_to_num(7.0), other.residual_out.nan_to_num(7.0))
        assert torch.equal(torch.isnan(t.normed), torch.isnan(other.normed))


def test_many_tokens(group: Group) -> None:
    for hidden in (8192, 16384):
        problem = random_problem(Shape(group.size, 8192, hidden, torch.bfloat16), DEVICE, 1, with_bias=False)
        run_and_check(group, problem, Variant(), exact=False)


@pytest.mark.parametrize("loader", [AUTO, BULK, CP_ASYNC, PUSH])
def test_epochs_survive_changes_of_the_cta_count_and_replayed_graphs(group: Group, loader: int) -> None:
    if loader == PUSH and group.size == 1:
        return
    problem = exact_problem(Shape(group.size, 96, 2048, torch.bfloat16), DEVICE, 3, with_bias=False)
    for ctas in (2, 7, 1, 16, 5, 16):
        run_and_check(group, problem, Variant(ctas=ctas, in_place=False, loader=loader), exact=True)
    variant = Variant(ctas=4, in_place=False, loader=loader)
    tensors = [place(group, rank, problem, variant) for rank in range(group.size)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(group, problem, variant, tensors)
    total = problem.inputs.double().sum(0) + problem.residual.double()
    for ctas in range(1, 16):
        for t in tensors:
            t.normed.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for t in tensors:
            assert torch.equal(t.normed.double(), total.sign() * problem.weight.double())
        between = loader if ctas % 2 == 0 else AUTO
        run_and_check(group, problem, dataclasses.replace(variant, ctas=ctas, loader=between), exact=True)
    group.check()


def test_refuses_what_cannot_work() -> None:
    group = Group(2, loopback=1, tensor_bytes=MEGABYTE, staging_bytes=MEGABYTE)
    problem = exact_problem(Shape(2, 64, 1024, torch.bfloat16), DEVICE, 0, with_bias=False)
    tensors = [place(group, rank, problem, Variant()) for rank in range(2)]
    call = Call(problem.weight)

    def refused(code: int, words: str, bad: list[RankTensors], how: LaunchConfig = LaunchConfig()) -> None:  # noqa: B008
        with pytest.raises(LibraryError, match=words) as caught:
            group.run(call, bad, how)
        assert caught.value.code == code

    def changed(**fields: torch.Tensor) -> list[RankTensors]:
        return [dataclasses.replace(t, **fields) for t in tensors]

    flat = torch.empty(65 * 1024, dtype=torch.bfloat16, device=DEVICE)
    refused(INVALID_ARGUMENT, "residual is not aligned", changed(residual=flat[1:]))
    narrow = torch.empty(4, 12, dtype=torch.bfloat16, device=DEVICE)
    refused(INVALID_ARGUMENT, "not a multiple of 8", changed(input=narrow))
    large = torch.empty(2048, 1024, dtype=torch.bfloat16, device=DEVICE)
    refused(INVALID_ARGUMENT, "need 4194304 bytes of staging", changed(input=large, normed=large))
    outside = dataclasses.replace(tensors[1], input=flat[1024:].view(64, 1024))
    refused(RANKS_DISAGREE, "different offsets", [tensors[0], outside])
    ends = [group.memory(rank)[-32 * 1024 :].view(torch.bfloat16) for rank in range(2)]
    reaching = [torch.as_strided(end, (64, 1024), (0, 1)) for end in ends]
    beyond = [dataclasses.replace(t, input=view) for t, view in zip(tensors, reaching, strict=True)]
    refused(INVALID_ARGUMENT, "past the end of the group's tensor memory", beyond)
    refused(UNSUPPORTED, "loopback has no switch", tensors, LaunchConfig(fabric=MULTIMEM))
    refused(UNSUPPORTED, "loopback needs all CTAs", tensors, LaunchConfig(fabric=PEER, ctas=100))
    refused(INVALID_ARGUMENT, "unknown fabric", tensors, LaunchConfig(fabric=9))
    group.run(call, tensors)  # still works
    torch.cuda.synchronize()
    group.check()
    group.close()


@pytest.mark.parametrize("fabric", [PEER, SOFT_MULTICAST])
def test_ranks_whose_tensors_lie_at_different_offsets_are_staged(group: Group, fabric: int) -> None:
    problem = exact_problem(Shape(group.size, 33, 1024, torch.bfloat16), DEVICE, 2, with_bias=False)
    tensors = []
    for rank in range(group.size):
        t = place(group, rank, problem, Variant())
        moved = group.tensor(rank, tuple(t.input.shape), t.input.dtype, MEGABYTE + 4096 * rank)
        moved.copy_(t.input)
        tensors.append(dataclasses.replace(t, input=moved, normed=moved))
    call = problem.call(residual_sharded=True, gather_residual=False)
    how = LaunchConfig(fabric, CP_ASYNC)
    if group.size > 1:
        with pytest.raises(LibraryError, match="different offsets"):
            group.run(call, tensors, how)
    group.run(dataclasses.replace(call, staged=True), tensors, how)
    torch.cuda.synchronize()
    group.check()
    total = problem.inputs.double().sum(0) + problem.residual.double()
    for t in tensors:
        assert torch.equal(t.normed.double(), total.sign() * problem.weight.double())
