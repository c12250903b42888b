"""Wave arithmetic against hand-worked shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.schedule import DEFAULT_OFFSETS
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableKey, TableRow, TuningTable
from trtllm_tokenweave.waves import (
    GemmShape,
    Tile,
    WaveModel,
    default_table,
    gemm_shapes,
    one_wave_tokens,
    plan_waves,
    seed_offsets,
    table_key,
    wave_count,
)

LAUNCH = LaunchConfig(ctas=16)


@pytest.mark.parametrize(
    ("tiles", "sms_left", "waves"),
    [(0, 132, 0), (1, 132, 1), (132, 132, 1), (133, 132, 2), (132, 124, 2), (124, 124, 1), (264, 132, 2), (5, 5, 2)],
)
def test_wave_count(tiles: int, sms_left: int, waves: int) -> None:
    assert wave_count(tiles, sms_left) == waves


@given(st.integers(0, 5000), st.integers(1, 70).map(lambda k: 2 * k))
def test_wave_count_is_the_ceiling_for_even_sms(tiles: int, sms_left: int) -> None:
    waves = wave_count(tiles, sms_left)
    assert (waves - 1) * sms_left < tiles <= waves * sms_left or tiles == waves == 0


def test_no_sms_left() -> None:
    with pytest.raises(UserError, match="1 SMs are left"):
        wave_count(5, 1)
    with pytest.raises(UserError, match=r"sms: -4 SMs are left for the GEMMs\. Fix: lower the CTAs"):
        wave_count(5, -4)
    with pytest.raises(UserError, match=r"tiles: -1 tiles are below 0\. Fix: "):
        wave_count(-1, 4)
    for sms, left in ((16, 0), (17, 1), (8, 0)):
        with pytest.raises(UserError, match=f"leaves {left} of {sms} SMs to the GEMMs.*at least 18"):
            WaveModel(attention=LAUNCH, mlp=LAUNCH, sms=sms)
    assert WaveModel(attention=LAUNCH, mlp=LAUNCH, sms=18).sms_left("mlp", "prefix") == 2


@pytest.mark.parametrize("sms", [-8, 0, 1, 1025])
def test_no_gpu_has_so_many_sms(sms: int) -> None:
    for refused in (lambda: WaveModel(sms=sms), lambda: one_wave_tokens(gemm_shapes(preset("llama-3.3-70b"), 8), sms)):
        with pytest.raises(UserError, match=rf"sms: {sms} is outside of 2\.\.1024\. Fix: give the GPU's SM count"):
            refused()


@pytest.mark.parametrize("ctas", [-8, 0, 134])
@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_no_collective_has_so_many_ctas(kind: str, ctas: int) -> None:
    """`model_copy` checks nothing: fewer CTAs than none would leave more SMs than there are."""
    launches = {"attention": LAUNCH, "mlp": LAUNCH} | {kind: LAUNCH.model_copy(update={"ctas": ctas})}
    with pytest.raises(UserError, match=rf"{kind}\.ctas: {ctas} is outside of 2\.\.132\. Fix: "):
        WaveModel(launches["attention"], launches["mlp"], sms=1024)


def test_a_tile_of_nothing() -> None:
    with pytest.raises(UserError, match=r"tile\.n: 0 is below 1\. Fix: give a tile's size"):
        Tile(128, 0)


def test_nothing_beside_the_gemms_leaves_them_all_sms() -> None:
    model = WaveModel(sms=8)
    assert [model.sms_left(block, half) for block in ("attention", "mlp") for half in ("prefix", "suffix")] == [8] * 4
    assert WaveModel(mlp=LAUNCH, sms=18).sms_left("mlp", "prefix") == 18
    assert WaveModel(mlp=LAUNCH, sms=18).sms_left("mlp", "suffix") == 2


def test_llama_70b_shapes() -> None:
    shapes = gemm_shapes(preset("llama-3.3-70b"), 8)
    assert [(shape.name, shape.n, shape.k) for shape in shapes] == [
        ("attention.qkv", 1280, 8192),
        ("attention.dense", 8192, 1024),
        ("mlp.fc+gate", 7168, 8192),
        ("mlp.proj", 8192, 3584),
    ]
    assert {(shape.groups, shape.rows_per_token) for shape in shapes} == {(1, 1)}
    # dense and fc+gate are 32 and 28 tiles wide: 4 tile rows fit into 132 SMs.
    assert one_wave_tokens(shapes) == 512


def test_mixtral_shapes() -> None:
    shapes = gemm_shapes(preset("mixtral-8x22b"), 8)
    fc = shapes[2]
    assert (fc.n, fc.k, fc.groups, fc.rows_per_token) == (4096, 6144, 8, 2)
    assert [fc.rows(n) for n in (0, 1, 4, 5, 512, 513)] == [0, 1, 1, 2, 128, 129]
    assert fc.tiles(512, Tile()) == 8 * 16
    # proj: 8 experts, 24 tiles wide: 192 tiles at a single row already.
    assert one_wave_tokens(shapes) == 0
    assert one_wave_tokens(shapes[:3]) == 512


@pytest.mark.parametrize(
    ("name", "tp_size"), [("smollm2-135m", 3), ("llama-3.3-70b", 8), ("llama-3.2-1b", 2), ("mixtral-8x7b", 8)]
)
def test_one_wave_tokens_is_the_edge(name: str, tp_size: int) -> None:
    shapes = gemm_shapes(preset(name), tp_size)
    edge = one_wave_tokens(shapes)
    model = WaveModel(attention=LAUNCH, mlp=LAUNCH)
    assert all(model.waves(shape, edge) <= 1 for shape in shapes)
    assert any(model.waves(shape, edge + 1) > 1 for shape in shapes)


def test_one_wave_rule_in_the_default_table() -> None:
    config = preset("smollm2-135m")
    table = default_table(config, 3)
    assert one_wave_tokens(gemm_shapes(config, 3)) == 4224
    assert table.min_tokens == 4225
    assert (table.lookup(1, 4224).mode, table.lookup(1, 4225).mode) == ("fuse", "weave")
    assert default_table(preset("llama-3.3-70b"), 8).min_tokens == 1024
    assert default_table(preset("mixtral-8x22b"), 8).min_tokens == 4096


def test_table_key() -> None:
    key = table_key(preset("mixtral-8x7b"), 4, gpu="NVIDIA H200")
    assert (key.gpu, key.tp_size, key.hidden_size, key.model_kind) == ("NVIDIA H200", 4, 4096, "moe")


def test_tp_that_cannot_be_served() -> None:
    with pytest.raises(UserError):
        gemm_shapes(preset("smollm2-135m"), 64)


def test_which_collective_runs_beside_which_half() -> None:
    model = WaveModel(attention=LaunchConfig(ctas=4), mlp=LaunchConfig(ctas=16, gemm_sms=100))
    assert model.sms_left("attention", "whole") == model.sms_left("mlp", "whole") == 132
    assert model.sms_left("attention", "prefix") == 100
    assert model.sms_left("attention", "suffix") == 128
    assert model.sms_left("mlp", "prefix") == 128
    assert model.sms_left("mlp", "suffix") == 100
    roomy = WaveModel(attention=LAUNCH, mlp=LaunchConfig(ctas=40, gemm_sms=120))
    assert roomy.sms_left("mlp", "suffix") == 92


def test_plan_waves() -> None:
    shapes = gemm_shapes(preset("llama-3.3-70b"), 8)
    row = TableRow(tokens=Bucket(lo=1025), mode="weave", attention=LAUNCH, mlp=LAUNCH)
    key = TableKey(tp_size=8, hidden_size=8192, dtype="bfloat16")
    table = TuningTable(key=key, rows=(row,))
    model = WaveModel(attention=LAUNCH, mlp=LAUNCH)
    woven = plan_waves(table.lookup(1, 2048), shapes, model)
    # 2048 tokens are 16 tile rows, halves 8; 116 SMs are left beside 16 CTAs.
    assert [(w.whole, w.prefix, w.suffix) for w in woven] == [(1, 1, 1), (4, 3, 3), (4, 2, 2), (4, 3, 3)]
    fused = plan_waves(table.lookup(1, 1000), shapes, model)
    assert [(w.whole, w.prefix, w.suffix) for w in fused] == [(1, 1, 0), (2, 2, 0), (2, 2, 0), (2, 2, 0)]


def test_seed_takes_the_split_that_fills_its_waves() -> None:
    # One column of tiles, 10 SMs left: 11 tile rows + 9 would need 2 + 1 waves, 10 + 10 need 1 + 1.
    shape = GemmShape("g", "mlp", n=256, k=64)
    launch = LaunchConfig(ctas=2)
    model = WaveModel(attention=launch, mlp=launch, sms=12)
    seeds = seed_offsets([shape], model, 2560, offsets=(0, 128, 256))
    assert (seeds[0].offset, seeds[0].prefix, seeds[0].suffix) == (0, 1280, 1280)
    assert seeds[0].wasted == pytest.approx(0.0)
    assert seeds[1].wasted == pytest.approx(1 / 3)
    # 18 tile rows: 9 + 9 wastes 2 of 20; so does 10 + 8: the tie goes to the more even halves.
    assert [seed.offset for seed in seed_offsets([shape], model, 2304, offsets=(128, 0))] == [0, 128]
    # 28 tile rows over 10 SMs: 14 + 14 need 2 + 2 waves, 20 + 8 only 2 + 1.
    assert seed_offsets([shape], model, 3584, offsets=(0, 128, 768))[0].offset == 768


def test_seeds_need_a_suffix() -> None:
    shapes = gemm_shapes(preset("llama-3.3-70b"), 8)
    model = WaveModel(attention=LAUNCH, mlp=LAUNCH)
    seeds = seed_offsets(shapes, model, 1024)
    assert sorted(seed.offset for seed in seeds) == [0, 64, 128, 192, 256]
    assert seed_offsets(shapes, model, 64) == ()
    assert all(0.0 <= seed.wasted < 1.0 for seed in seeds)
    assert {seed.offset for seed in seed_offsets(shapes, model, 8192)} == set(DEFAULT_OFFSETS)
