"""Weave a user's recorded network and, where it holds weights, run it against itself unwoven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.attention_roles import int_field
from trtllm_tokenweave.batch import SequenceStep, StepLayout, step_inputs
from trtllm_tokenweave.comm import LocalComm, run_ranks
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.interpreter import ExecutionContext
from trtllm_tokenweave.kv_cache import BlockManager, KvCacheConfig, KvCachePool
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.passes import WeaveOptions, WeaveResult, weave
from trtllm_tokenweave.recorder import IConstantLayer, IPluginV2Layer, RecordedNetwork, load
from trtllm_tokenweave.recorder.enums import FLOATS, numpy_dtype
from trtllm_tokenweave.table import TuningTable

Inputs = dict[str, NDArray[Any]]

#: Token counts of the steps that are compared; the first is below the demo's threshold.
STEPS = (5, 37, 64)

#: How far results may move, over the largest value, by dtype of the residual stream.
_BOUNDS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class NetworkCheck:
    """What the pass did with a network, and how far its results moved.

    Attributes:
        weave: The pass's result.
        max_diff: Largest absolute difference of an output between stock and woven, or None where it was not run.
        relative_diff: The same over the largest absolute value of that output.
        bound: What the relative difference may be; the fused operation rounds less often than the stock layers.
        skipped: Why it was not run.
    """

    weave: WeaveResult
    max_diff: float | None
    relative_diff: float | None
    bound: float
    skipped: str = ""

    @property
    def identical(self) -> bool:
        """Whether nothing moved by more than rounding explains."""
        return self.relative_diff is None or self.relative_diff <= self.bound


def check_network(stock: RecordedNetwork, path: Path, table: TuningTable) -> NetworkCheck:
    """Weave a network for every rank and compare the results of a few random steps.

    The file is one rank's network; every virtual rank runs it with the same weights, which proves the same about
    the pass as different weights would.

    Args:
        stock: The network as it was read from ``path``; it stays as it is.
        path: Where it was read from: weaving edits a network, so each rank's is read anew.
        table: When to split, for the network's tp_size.

    Raises:
        UserError: when the file is no network.
    """
    tp_size = table.key.tp_size
    woven = [load(path) for _ in range(tp_size)]
    results = [
        weave(n, WeaveOptions(Mapping(tp_size, rank, tp_size), table, max_batch_size=8, max_num_tokens=max(STEPS)))
        for rank, n in enumerate(woven)
    ]
    bound = _BOUNDS[table.key.dtype]
    if any(isinstance(x, IConstantLayer) and x.weights.array is None for x in stock.layers):
        return NetworkCheck(results[0], None, None, bound, "it holds shapes only, so there is nothing to run")
    try:
        differences = [_difference([stock] * tp_size, woven, n) for n in STEPS]
    except UserError as error:
        return NetworkCheck(results[0], None, None, bound, f"it cannot be run here: {error}")
    return NetworkCheck(results[0], max(d for d, _ in differences), max(r for _, r in differences), bound)


def _difference(stock: list[RecordedNetwork], woven: list[RecordedNetwork], num_tokens: int) -> tuple[float, float]:
    """Largest absolute and relative difference over all outputs of one step."""
    outputs = [_run(networks, num_tokens) for networks in (stock, woven)]
    absolute = relative = 0.0
    for name, a in outputs[0].items():
        x, y = a.astype(np.float64), outputs[1][name].astype(np.float64)
        diff = float(np.abs(x - y).max()) if x.size else 0.0
        absolute, relative = max(absolute, diff), max(relative, diff / max(float(np.abs(x).max()), 1e-30))
    return absolute, relative


def _run(networks: list[RecordedNetwork], num_tokens: int) -> Inputs:
    contexts = [ExecutionContext(n, c) for n, c in zip(networks, LocalComm.group(len(networks)), strict=True)]
    attention = [
        x for x in networks[0].layers if isinstance(x, IPluginV2Layer) and x.plugin.plugin_type == "GPTAttention"
    ]
    if attention:
        inputs = [_attention_inputs(context, attention, num_tokens) for context in contexts]
    else:
        inputs = [_random_inputs(networks[0], num_tokens)] * len(contexts)
    jobs: list[Callable[[], Inputs]] = [lambda c=c, i=i: c.run(i) for c, i in zip(contexts, inputs, strict=True)]  # type: ignore[misc]
    return run_ranks(jobs)[0]


def _random_inputs(network: RecordedNetwork, num_tokens: int) -> Inputs:
    """Random values for every input; each dynamic dimension is the number of tokens."""
    rng = np.random.default_rng(num_tokens)
    inputs: Inputs = {}
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shape = tuple(num_tokens if d < 0 else d for d in tensor.shape)
        if tensor.dtype not in FLOATS:
            raise UserError(f"input {tensor.name} is {tensor.dtype.name}: its meaning is not known")
        inputs[tensor.name] = rng.standard_normal(shape, np.float32).astype(numpy_dtype(tensor.dtype))
    return inputs


def _attention_inputs(context: ExecutionContext, attention: list[IPluginV2Layer], num_tokens: int) -> Inputs:
    """One prompt of ``num_tokens`` tokens, with a KV-cache pool of its own bound to the context."""
    network, fields = context.network, attention[0].plugin.fields
    block = int_field(fields, "tokens_per_block")
    config = KvCacheConfig(
        num_layers=len(attention),
        num_kv_heads=int_field(fields, "num_kv_heads"),
        head_size=int_field(fields, "head_size"),
        dtype=numpy_dtype(attention[0].outputs[0].dtype),
        num_blocks=-(-num_tokens // block),
        tokens_per_block=block,
    )
    pool = KvCachePool(config)
    context.pools.update(pool.bindings)
    blocks = BlockManager(config)
    blocks.grow(0, num_tokens)
    vocabulary = _vocabulary(network)
    tokens = tuple(int(t) for t in np.random.default_rng(num_tokens).integers(0, vocabulary, num_tokens))
    sequence = SequenceStep(sequence=0, tokens=tokens, start=0, prompt_length=num_tokens, is_context=True)
    given = step_inputs([sequence], StepLayout(pool, blocks, num_tokens))
    names = {network.get_input(i).name for i in range(network.num_inputs)}
    return {name: value for name, value in given.items() if name in names}


def _vocabulary(network: RecordedNetwork) -> int:
    """Rows of the table that input_ids are looked up in."""
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        if tensor.name == "input_ids":
            for reader, position in tensor.consumers:
                data = reader.get_input(0)
                if reader.layer_type.name == "GATHER" and position == 1 and data is not None:
                    return data.shape[0]
    raise UserError("no embedding reads input_ids")
