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
    CP_ASYNC,
    MULTIMEM,
    PEER,
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_counts(group: Group, dtype: torch.dtype) -> None:
    counts = [0, 1, 2, 3, 7, 8, 9, 127, 1000, 2048]
    for seed, (tokens, symmetric) in enumerate(itertools.product(counts, [True, False])):
        problem = exact_problem(Shape(group.size, tokens, 1024, dtype), DEVICE, seed, with_bias=False)
        run_and_check(group, problem, Variant(symmetric=symmetric, in_place=False), exact=True)


def test_many_tokens(group: Group) -> None:
    for hidden in (8192, 16384):
        problem = random_problem(Shape(group.size, 8192, hidden, torch.bfloat16), DEVICE, 1, with_bias=False)
        run_and_check(group, problem, Variant(), exact=False)


def test_epochs_survive_changes_of_the_cta_count_and_replayed_graphs(group: Group) -> None:
    problem = exact_problem(Shape(group.size, 96, 2048, torch.bfloat16), DEVICE, 3, with_bias=False)
    for ctas in (2, 7, 1, 16, 5, 16):
        run_and_check(group, problem, Variant(ctas=ctas, in_place=False), exact=True)
    variant = Variant(ctas=4, in_place=False)
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
        run_and_check(group, problem, dataclasses.replace(variant, ctas=ctas), exact=True)
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
