"""Predicted steps: their bounds, what makes them shorter or longer, and the notes beside them."""

from __future__ import annotations

from typing import Any

import pytest

from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.passes.order import serial_order
from trtllm_tokenweave.plugin_specs import SiteKind
from trtllm_tokenweave.predict import Gemms, Predictor, Workload, load_machine, variants
from trtllm_tokenweave.predict.step import Kernels, Rows

LLAMA = preset("llama-3.3-70b")
COUNTS = (1, 64, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384)


LLAMA = preset("llama-3.3-70b")
COUNTS = (1, 64, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384)


def predictor(machine: str = "h100-multimem", tp_size: int = 8, gemms: Gemms = "budget", **options: Any) -> Predictor:
    return Predictor(load_machine(machine), Workload(LLAMA, tp_size, **options), gemms)


@pytest.fixture(
    scope="module", params=[("h100-multimem", 8, "library"), ("h200-peer", 2, "trt"), ("h200-peer", 2, "budget")]
)
def steps(request: pytest.FixtureRequest) -> tuple[Predictor, list[variants.StepTimes]]:
    made = predictor(*request.param)
    return made, [made.predict(count) for count in COUNTS]


def test_bounds(steps: tuple[Predictor, list[variants.StepTimes]]) -> None:
    made, times = steps
    machine, workload = made.machine, made.workload
    kernels = Kernels(machine, workload)
    for step in times:
        assert step.no_comm_us < step.stock_us
        assert step.fuse_only_us < step.stock_us
        for split in (step.even, step.best):
            if split is None:
                assert step.num_tokens <= 128
                continue
            lengths = workload.sequences(step.num_tokens)
            halves = Rows(lengths, 0, split.prefix), Rows(lengths, split.prefix, step.num_tokens)
            compute = sum(op.us for half in halves for kind in SiteKind for op in kernels.block(kind, half))
            sizes = [workload.activation(half.count) for half in halves]
            communication = sum(
                machine.fused_us(ctas, size, workload.tp_size)
                for size in sizes
                for ctas in (split.attention_ctas, split.mlp_ctas)
            )
            assert split.us >= LLAMA.num_hidden_layers * max(compute, communication)
            assert split.us <= LLAMA.num_hidden_layers * (1.6 * compute + communication) + 1e5
        if step.best is not None and step.even is not None:
            assert step.best.us <= step.even.us
            assert step.even.offset == 0


def test_more_tokens_take_longer(steps: tuple[Predictor, list[variants.StepTimes]]) -> None:
    _, times = steps
    for name in ("stock_us", "no_comm_us", "fuse_only_us"):
        series = [getattr(step, name) for step in times]
        assert series == sorted(series)
    woven = [step.best.us for step in times if step.best is not None]
    assert woven == sorted(woven)


def test_large_steps_gain_and_small_ones_do_not(steps: tuple[Predictor, list[variants.StepTimes]]) -> None:
    _, times = steps
    large, small = times[-2], predictor().predict(256)
    assert large.best is not None
    assert small.best is not None
    assert large.best.us < large.fuse_only_us
    assert small.best.us > small.fuse_only_us


def test_layers_beyond_the_simulated_repeat_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens, offset, ctas in ((1024, 0, 16), (2048, 128, 8), (8192, 0, 2)):
        short = predictor().woven(tokens, offset, ctas, ctas)
        monkeypatch.setattr(variants, "SIMULATED_LAYERS", LLAMA.num_hidden_layers)
        assert predictor().woven(tokens, offset, ctas, ctas).us == pytest.approx(short.us, rel=2e-3)
        monkeypatch.undo()


def test_the_woven_order_is_what_hides_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    woven = predictor().woven(8192, 0, 8, 8).us
    monkeypatch.setattr(variants, "collective_order", serial_order)
    made = predictor()
    size = made.workload.activation(4096)
    hidden = 2 * 2 * LLAMA.num_hidden_layers * made.machine.fused_us(8, size, 8)
    # Extrapolation from the last layers does not hold for this order: it ends one half before the other begins.
    monkeypatch.setattr(variants, "SIMULATED_LAYERS", LLAMA.num_hidden_layers)
    assert made.woven(8192, 0, 8, 8).us > woven + 0.7 * hidden


def test_sequences_and_stand_ins() -> None:
    one, eight = predictor().stock_us(8192), predictor(batch=8).stock_us(8192)
    assert eight < one
    few, many = (predictor(stand_in_keys=keys).stock_us(8192) for keys in (512, 4096))
    assert few < many


def test_notes() -> None:
    assert predictor().notes() == ()
    notes = Predictor(load_machine("h200-peer"), Workload(preset("qwen2.5-72b"), 4)).notes()
    assert "measured at tp_size 2 and are scaled by traffic" in notes[0]
    assert "wave model" in notes[1]


def test_notes_on_mixtures_of_experts() -> None:
    notes = Predictor(load_machine("h200-peer"), Workload(preset("mixtral-8x7b"), 2)).notes()
    assert any("mixtures of experts are predicted badly" in note for note in notes)
    assert not any("mixtures" in note for note in predictor("h200-peer").notes())


def test_notes_on_steps_beyond_the_measured() -> None:
    made = predictor()
    assert made.notes([64, 4608]) == ()
    (gemms,) = made.notes(iter([32768, 4609, 64]))
    assert "GEMMs were measured at 64 to 4608 tokens: extrapolated for 4609, 32768" in gemms
    gemms, collectives = made.notes([65536, 63])
    assert "for 63, 65536" in gemms
    assert "collectives and norms were measured at 64 to 32768 tokens: extrapolated for 63, 65536" in collectives
    # By bytes and by traffic: eight ranks move 7/4 of what two do, and half the hidden size half of it.
    assert "at 64 to 9362 tokens" in predictor("h200-peer").notes([16384])[-1]
    small = Predictor(load_machine("h200-peer"), Workload(preset("llama-3.1-8b"), 2))
    assert "collectives and norms were measured at 128 to 32768 tokens" in small.notes([100])[-1]
