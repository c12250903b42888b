"""The decoder layers that `bench stack` builds, on the interpreter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.models import small
from support.stack import run

from trtllm_tokenweave.bench.stack_network import VARIANTS, Stack, Variant
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.network import Graph
from trtllm_tokenweave.passes import WeaveOptions, verify
from trtllm_tokenweave.patterns import is_all_reduce
from trtllm_tokenweave.recorder import RecordedNetwork
from trtllm_tokenweave.table import TuningTable
from trtllm_tokenweave.waves import table_key

CONFIG = small()
TABLE = TuningTable(key=table_key(CONFIG, 2), granularity=16, min_tokens=1, rows=())


def stack(rank: int) -> Stack:
    return Stack(CONFIG, WeaveOptions(Mapping(2, rank, 2), TABLE, 8, 128), keys=24)


def networks(variant: Variant) -> list[RecordedNetwork]:
    made = [RecordedNetwork(), RecordedNetwork()]
    modes = {"stock": "stock", "no_comm": "stock", "fuse_only": "fuse", "woven": "weave"}
    for rank, network in enumerate(made):
        assert stack(rank).build(network, variant).mode == modes[variant]
        assert verify(network) == []
    return made


def test_all_variants_but_no_comm_compute_the_same() -> None:
    x = {"x": np.random.default_rng(3).standard_normal((70, CONFIG.hidden_size)).astype(ml_dtypes.bfloat16)}
    out = {variant: [r["out"].astype(np.float32) for r in run(networks(variant), x)] for variant in VARIANTS}
    for variant in ("stock", "fuse_only", "woven"):
        np.testing.assert_array_equal(out[variant][0], out[variant][1])
        error = np.linalg.norm(out[variant][0] - out["stock"][0]) / np.linalg.norm(out["stock"][0])
        assert error < 0.02
    assert np.linalg.norm(out["no_comm"][0] - out["stock"][0]) > 0.2 * np.linalg.norm(out["stock"][0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_stock_stack_has_all_reduces_left(variant: Variant) -> None:
    graph = Graph(networks(variant)[0])
    count = sum(is_all_reduce(node) for node in graph.live)
    assert count == (2 * CONFIG.num_hidden_layers if variant == "stock" else 0)


def test_weights_differ_by_rank_and_layer_and_norms_do_not() -> None:
    first, second = stack(0).weights, stack(1).weights
    layers = [f"transformer.layers.{i}" for i in range(2)]
    for name in (f"{layers[0]}.attention.qkv.weight", f"{layers[0]}.attention.keys.weight"):
        assert not np.array_equal(first[name], second[name])
    assert not np.array_equal(first[f"{layers[0]}.mlp.proj.weight"], first[f"{layers[1]}.mlp.proj.weight"])
    for name, weight in first.items():
        assert weight.flags.c_contiguous
        assert weight.dtype == ml_dtypes.bfloat16
        if weight.ndim == 1:
            np.testing.assert_array_equal(weight, second[name])
