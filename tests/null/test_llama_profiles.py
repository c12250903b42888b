"""Optimisation profiles of a decoder."""

from __future__ import annotations

import pytest

from trtllm_tokenweave.builder import ShapeRange, opt_num_tokens
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.llama import NetworkOptions, build_llama
from trtllm_tokenweave.llama.profiles import decoder_profile
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.passes import WeaveOptions, weave
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.recorder.enums import DataType
from trtllm_tokenweave.table import TableKey, TuningTable

OPTIONS = NetworkOptions(max_batch_size=8, max_num_tokens=4096, max_seq_len=1000, tokens_per_block=64)


def test_every_dynamic_input_of_a_decoder_has_a_range() -> None:
    config, mapping = preset("smollm2-135m"), Mapping(world_size=3, rank=0, tp_size=3)
    network = RecordedNetwork()
    build_llama(network, config, mapping, None, OPTIONS)
    table = TuningTable(key=TableKey(tp_size=3, hidden_size=config.hidden_size, dtype=config.dtype))
    result = weave(network, WeaveOptions(mapping, table, OPTIONS.max_batch_size, OPTIONS.max_num_tokens))
    optimum = opt_num_tokens(table, OPTIONS.max_num_tokens, OPTIONS.max_batch_size)
    assert result.plan.region is not None
    assert result.plan.region.lookup.evaluate(4, optimum)[1] > 0
    profile = decoder_profile(network, OPTIONS, optimum)
    inputs = {t.name: t.shape for t in (network.get_input(i) for i in range(network.num_inputs))}
    assert set(profile) == {name for name, shape in inputs.items() if -1 in shape}
    assert profile["input_ids"] == ShapeRange((1,), (optimum,), (4096,))
    assert profile["context_lengths"] == ShapeRange((1,), (4,), (8,))
    assert profile["kv_cache_block_offsets"] == ShapeRange((1, 1, 2, 1), (1, 4, 2, 8), (1, 8, 2, 16))
    assert profile["cache_indirection"] == ShapeRange((1, 1, 1), (4, 1, 500), (8, 1, 1000))
    for name, shapes in profile.items():
        for low, best, high, fixed in zip(shapes.minimum, shapes.optimum, shapes.maximum, inputs[name], strict=True):
            assert low <= best <= high
            assert fixed == -1 or low == high == fixed


@pytest.mark.parametrize("tokens", [0, 4097])
def test_optima_out_of_range(tokens: int) -> None:
    with pytest.raises(UserError, match=rf"opt_num_tokens: {tokens} is outside of 1\.\.4096"):
        decoder_profile(RecordedNetwork(), OPTIONS, tokens)


def test_a_dimension_that_is_not_known() -> None:
    network = RecordedNetwork()
    network.add_input("x", DataType.INT32, (-1, 2)).set_dimension_name(0, "pixels")
    with pytest.raises(UserError, match="input x: the range of its dimension 'pixels' is not known"):
        decoder_profile(network, OPTIONS, 100)
