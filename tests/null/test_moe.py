from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trtllm_tokenweave.comm import SingleComm
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter.moe import mixture_of_experts, route
from trtllm_tokenweave.interpreter.registry import KernelContext
from trtllm_tokenweave.recorder.enums import DataType, numpy_dtype

Array = NDArray[Any]
EXPERTS, HIDDEN, INNER, TOP_K = 5, 16, 12, 2


def moe_fields(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "number_of_experts": EXPERTS,
        "top_k": TOP_K,
        "expert_hidden_size": HIDDEN,
        "expert_inter_size": INNER,
        "activation_type": 3,
        "normalization_mode": 1,
        "tp_size": 1,
        "tp_rank": 0,
        "ep_size": 1,
        "ep_rank": 0,
    }
    return fields | changes


def tensors(rows: int, dtype: Any = np.float32, seed: int = 0) -> list[Array]:
    """hidden_states, routing, fc weights, proj weights."""
    rng = np.random.default_rng(seed)
    shapes = [(rows, HIDDEN), (rows, EXPERTS), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)]
    arrays = [rng.normal(size=s).astype(np.float32) for s in shapes]
    return [x if i == 1 else x.astype(dtype) for i, x in enumerate(arrays)]


def dense(inputs: list[Array], mode: int = 1) -> Array:
    """Float64 oracle: every expert for every token, weighted with zeros for those not chosen."""
    x, logits, fc, proj = (a.astype(np.float64) for a in inputs)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    rank = np.argsort(np.argsort(-weights, axis=1, kind="stable"), axis=1)
    weights = np.where(rank < TOP_K, weights, 0)
    if mode == 1:
        weights /= weights.sum(axis=1, keepdims=True)
    both = np.einsum("nh,efh->nef", x, fc)
    up, gate = both[..., :INNER], both[..., INNER:]
    results = np.einsum("nef,ehf->neh", up * gate / (1 + np.exp(-gate)), proj)
    out: Array = np.einsum("ne,neh->nh", weights, results)
    return out


def run(inputs: list[Array], exact: bool = False, **changes: Any) -> Array:
    (out,) = mixture_of_experts(KernelContext(SingleComm(), exact=exact), moe_fields(**changes), inputs)
    assert out.dtype == inputs[0].dtype
    return out


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [("FLOAT", 3e-6), ("HALF", 4e-3), ("BF16", 3e-2)])
def test_agrees_with_all_experts_in_float64(dtype: str, tolerance: float, mode: int, exact: bool) -> None:
    inputs = tensors(9, numpy_dtype(DataType[dtype]))
    expected = dense(inputs, mode)
    got = run(inputs, exact, normalization_mode=mode).astype(np.float64)
    np.testing.assert_allclose(got, expected, atol=tolerance * np.abs(expected).max())


def test_the_linear_rows_come_first() -> None:
    inputs = tensors(4)
    swapped = [*inputs[:2], np.concatenate([inputs[2][:, INNER:], inputs[2][:, :INNER]], axis=1), inputs[3]]
    assert not np.allclose(run(swapped), run(inputs), atol=1e-2)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), st.data())
def test_rows_do_not_depend_on_the_batch(rows: int, data: st.DataObject) -> None:
    inputs = tensors(rows, seed=rows)
    cut = data.draw(st.integers(0, rows))
    halves = [run([inputs[0][s], inputs[1][s], *inputs[2:]], exact=True) for s in (slice(cut), slice(cut, None))]
    assert np.concatenate(halves).tobytes() == run(inputs, exact=True).tobytes()


def test_ranks_hold_slices_of_the_experts_width() -> None:
    inputs = tensors(7)
    hidden, routing, fc, proj = inputs
    half = INNER // 2
    total = np.zeros((7, HIDDEN), np.float32)
    for rank in range(2):
        part = slice(rank * half, (rank + 1) * half)
        local = np.concatenate([fc[:, :INNER][:, part], fc[:, INNER:][:, part]], axis=1)
        total += run([hidden, routing, local, proj[..., part]], expert_inter_size=half, tp_size=2, tp_rank=rank)
    np.testing.assert_allclose(total, run(inputs), atol=2e-5)


def test_chosen_experts_as_inputs_give_the_same() -> None:
    inputs = tensors(6)
    hidden, routing, fc, proj = inputs
    experts, scales = route(routing, TOP_K, renormalize=True)
    fields = moe_fields(experts_per_token=TOP_K, use_final_scales=1)
    (got,) = mixture_of_experts(
        KernelContext(SingleComm()), fields, [hidden, fc, proj, experts.astype(np.int32), scales]
    )
    assert got.tobytes() == run(inputs).tobytes()


def test_equal_logits_choose_the_lowest_experts() -> None:
    experts, scales = route(np.zeros((2, 4), np.float32), 3, renormalize=False)
    assert experts.tolist() == [[0, 1, 2]] * 2
    assert scales.tolist() == [[0.25] * 3] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_type": 0}, "activation_type 0"),
        ({"normalization_mode": 2}, "normalization_mode 2"),
        ({"ep_size": 2}, "expert parallelism"),
        ({"expert_inter_size": 13}, "fc weights have shape"),
        ({"expert_hidden_size": 8}, "hidden_states have shape"),
        ({"number_of_experts": None}, "'number_of_experts' is None"),
    ],
)
def test_what_is_not_served_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tensors(3), **changes)


def test_wrong_inputs_are_refused() -> None:
    inputs = tensors(3)
    with pytest.raises(UserError, match="has 5 inputs, expected 4"):
        run([*inputs, inputs[0]])
    hidden, _, fc, proj = inputs
    outside = np.full((3, TOP_K), EXPERTS, np.int32)
    with pytest.raises(UserError, match=r"expert outside 0\.\.4"):
        mixture_of_experts(
            KernelContext(SingleComm()),
            moe_fields(experts_per_token=TOP_K),
            [hidden, fc, proj, outside, np.ones((3, TOP_K), np.float32)],
        )
