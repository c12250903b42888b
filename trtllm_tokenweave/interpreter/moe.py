"""MixtureOfExperts plugin of the interpreter (SwiGLU experts, any top-k, tensor parallel over the experts' width).

Two forms, as TensorRT-LLM's releases have them:

- with ``top_k`` and ``normalization_mode``: inputs hidden_states [n, h], routing logits [n, E] float32,
  fc weights [E, 2f, h], proj weights [E, h, f];
- with ``experts_per_token`` (about 0.18 on): inputs hidden_states, fc weights, proj weights,
  token_selected_experts [n, k] int32, and token_final_scales [n, k] float32 if ``use_final_scales``.

The first f rows of fc are the linear (up) part, the last f the gate; an expert's result is
``proj @ (up(x) * silu(gate(x)))``. This rank holds f of the experts' width, so results are partial sums.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter.registry import KernelContext, kernel
from trtllm_tokenweave.recorder.plugin import Fields

Array = NDArray[Any]
Floats = NDArray[np.floating[Any]]


class MoeActivation(enum.IntEnum):
    """Field ``activation_type``; only the gated one that Mixtral uses is served."""

    SWIGLU = 3


class Normalization(enum.IntEnum):
    """Field ``normalization_mode``: whether the chosen experts' weights are scaled to sum to one."""

    NONE = 0
    RENORMALIZE = 1


@dataclass(frozen=True)
class _Call:
    hidden: Array
    fc: Array
    proj: Array
    experts: Array
    scales: Floats


@kernel("MixtureOfExperts", "1", "tensorrt_llm")
def mixture_of_experts(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> list[Array]:
    """Return the weighted sum of each token's experts: [n, h], row by row.

    Products are summed in float32 (float64, row by row, in exact mode). The activation and each expert's result are
    rounded to the model's dtype, the weighted sum is float32 in the order of the choice, rounded once.

    Raises:
        UserError: for a feature or a shape that is not served; names the layer.
    """
    where = f"layer {ctx.layer}" if ctx.layer else "MixtureOfExperts"
    call = _read(fields, inputs, where)
    _check(fields, call, where)
    slots = _exact_results(call) if ctx.exact else _results(ctx, call)
    total = np.zeros(call.hidden.shape, np.float32)
    for k in range(call.experts.shape[1]):
        total += call.scales[:, k, None] * slots[:, k]
    return [total.astype(call.hidden.dtype, copy=False)]


def _int(fields: Fields, name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if not isinstance(value, (int, float)):
        raise UserError(f"field {name!r} is {value!r}, expected a number", where="MixtureOfExperts")
    return int(value)


def _read(fields: Fields, inputs: list[Array], where: str) -> _Call:
    selected = "experts_per_token" in fields
    expected = 4 + int(selected and _int(fields, "use_final_scales", 1) != 0)
    if len(inputs) != expected:
        raise UserError(f"has {len(inputs)} inputs, expected {expected} (no bias, LoRA or quantisation)", where=where)
    if selected:
        hidden, fc, proj, experts = inputs[:4]
        scales = inputs[4].astype(np.float32) if expected > 4 else np.ones(experts.shape, np.float32)
        return _Call(hidden, fc, proj, experts, scales)
    hidden, routing, fc, proj = inputs
    mode = _int(fields, "normalization_mode")
    if mode not in (Normalization.NONE, Normalization.RENORMALIZE):
        raise UserError(f"normalization_mode {mode} is not served (0 none, 1 renormalize)", where=where)
    experts, scales = route(routing, _int(fields, "top_k"), renormalize=mode == Normalization.RENORMALIZE)
    return _Call(hidden, fc, proj, experts, scales)


def route(logits: Array, top_k: int, *, renormalize: bool) -> tuple[Array, Floats]:
    """Choose each token's experts: softmax over all, the largest ``top_k`` (ties: lowest index first).

    Args:
        logits: [n, E] float.
        top_k: Experts per token.
        renormalize: Scale the chosen weights to sum to one.

    Returns:
        Expert indices and weights, [n, top_k] int64 and float32, best first.
    """
    x = logits.astype(np.float32)
    chosen = np.argsort(-x, axis=-1, kind="stable")[:, :top_k]
    # In float64: a float32 exponential may differ in its last bit with its place in a vector.
    weights = np.exp((x - x.max(axis=-1, keepdims=True)).astype(np.float64)).astype(np.float32)
    picked = np.take_along_axis(weights, chosen, axis=-1)
    # Added one by one, so that a row's weights never depend on how many rows there are.
    whole = picked if renormalize else weights
    total = np.zeros((len(x), 1), np.float32)
    for column in range(whole.shape[1]):
        total += whole[:, column : column + 1]
    return chosen, picked / total


def _check(fields: Fields, call: _Call, where: str) -> None:
    experts, hidden, inner = (
        _int(fields, name) for name in ("number_of_experts", "expert_hidden_size", "expert_inter_size")
    )
    activation = _int(fields, "activation_type")
    if activation != MoeActivation.SWIGLU:
        raise UserError(f"activation_type {activation} is not served (3 swiglu)", where=where)
    if _int(fields, "ep_size", 1) != 1:
        raise UserError("expert parallelism (ep_size above 1) is not served", where=where)
    for name, given, shape in (
        ("hidden_states", call.hidden.shape[1:], (hidden,)),
        ("fc weights", call.fc.shape, (experts, 2 * inner, hidden)),
        ("proj weights", call.proj.shape, (experts, hidden, inner)),
        ("expert choice", call.experts.shape[:1], call.hidden.shape[:1]),
        ("expert weights", call.scales.shape, call.experts.shape),
    ):
        if given != shape:
            raise UserError(f"{name} have shape {given}, expected {shape}", where=where)
    if call.experts.size and not 0 <= int(call.experts.min()) <= int(call.experts.max()) < experts:
        raise UserError(f"a token chose an expert outside 0..{experts - 1}", where=where)


def _silu(gate: Floats) -> Floats:
    # exp of a clipped argument: silu is 0 to every dtype long before.
    result: Floats = gate / (1 + np.exp(np.minimum(-gate, 88)))
    return result


def _results(ctx: KernelContext, call: _Call) -> Floats:
    """Each token's experts' results [n, top_k, h] float32, one pair of products per expert."""
    dtype, inner = call.hidden.dtype, call.proj.shape[2]
    fc, proj = ctx.float32_copy(call.fc), ctx.float32_copy(call.proj)
    x = call.hidden.astype(np.float32, copy=False)
    slots = np.zeros((*call.experts.shape, call.hidden.shape[1]), np.float32)
    for expert in np.unique(call.experts):
        rows, choice = np.nonzero(call.experts == expert)
        both = x[rows] @ fc[expert].T
        active = (both[:, :inner] * _silu(both[:, inner:])).astype(dtype, copy=False).astype(np.float32, copy=False)
        slots[rows, choice] = (active @ proj[expert].T).astype(dtype, copy=False)
    return slots


def _exact_results(call: _Call) -> Floats:
    dtype, inner = call.hidden.dtype, call.proj.shape[2]
    slots = np.zeros((*call.experts.shape, call.hidden.shape[1]), np.float32)
    for row, choice in np.ndindex(*call.experts.shape):
        expert = call.experts[row, choice]
        both = (call.fc[expert].astype(np.float64) * call.hidden[row].astype(np.float64)).sum(axis=-1)
        active = (both[:inner] * _silu(both[inner:])).astype(dtype).astype(np.float64)
        slots[row, choice] = (call.proj[expert].astype(np.float64) * active).sum(axis=-1).astype(dtype)
    return slots
