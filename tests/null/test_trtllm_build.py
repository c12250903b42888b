"""`trtllm-build --plugin tokenweave` against the double: what is woven, set and recorded."""

from __future__ import annotations

import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import trtllm_double
from support.models import small_table, tiny
from support.trtllm_place import Place, place

from trtllm_tokenweave import __version__
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.errors import TokenWeaveError, UserError
from trtllm_tokenweave.passes import verify, verify_ranks
from trtllm_tokenweave.trtllm import rank_build, surface
from trtllm_tokenweave.trtllm.command import run

__all__ = ["place"]  # a fixture


# ---- networks


@pytest.mark.parametrize("reduce_fusion", ["disable", "enable"])
@pytest.mark.parametrize(("architecture", "tp_size"), [("LlamaForCausalLM", 2), ("LlamaForCausalLM", 8)])
def test_llama(place: Place, architecture: str, tp_size: int, reduce_fusion: str) -> None:
    place.config, place.tp_size = tiny(architecture), tp_size
    assert run(place.woven("--reduce_fusion", reduce_fusion)) == 0
    networks = [place.network(rank) for rank in range(tp_size)]
    for rank, network in enumerate(networks):
        assert verify(network) == []
        assert place.all_reduces(rank) == 0
        record = place.record(rank)
        assert (record["mode"], record["sites"], record["attention"], record["refused"]) == ("weave", 4, "split", [])
        assert place.told(rank)["features"] == {"aliased": True}
        assert place.told(rank)["max_aux_streams"] == 0
    assert verify_ranks(networks) == []


@pytest.mark.parametrize(("architecture", "fused"), [("LlamaForCausalLM", 3), ("MixtralForCausalLM", 0)])
def test_stock_networks_are_what_the_weave_has_to_find(place: Place, architecture: str, fused: int) -> None:
    place.config = tiny(architecture)
    assert run(place.words("--reduce_fusion", "enable")) == 0
    layers = [layer for layer in place.network().layers if hasattr(layer, "plugin")]
    reduces = [layer.plugin.fields["fusion_op"] for layer in layers if layer.plugin.plugin_type == "AllReduce"]
    assert (len(reduces), sum(reduces)) == (4, fused)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "MixtralForCausalLM"])
def test_other_models_have_no_reduce_fusion_and_are_woven(place: Place, architecture: str) -> None:
    place.config = tiny(architecture)
    assert run(place.woven("--reduce_fusion", "enable")) == 0
    assert (place.record()["mode"], place.record()["sites"]) == ("weave", 4)
    assert place.all_reduces() == 0


def test_an_architecture_that_is_not_optimised_is_woven_before_it_is_built(place: Place) -> None:
    place.architecture = "DecoderModel"
    assert run(place.woven()) == 0
    assert place.record()["mode"] == "weave"


def test_without_the_plugin_the_stock_engine_is_built(place: Place) -> None:
    assert run(place.words()) == 0
    assert not (place.out / "rank0.tokenweave.json").exists()
    assert "tokenweave" not in json.loads((place.out / "config.json").read_text())
    assert place.all_reduces() == 4
    assert place.told()["features"] == {}


def test_one_rank_has_nothing_to_fuse(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.tp_size = 1
    assert run(place.woven()) == 0
    assert place.record()["mode"] == "stock"
    assert place.told()["features"] == {}
    assert place.told()["max_aux_streams"] == -1
    assert "tp_size is 1, so there is no AllReduce to fuse" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["pp_size", "cp_size"])
def test_other_parallelism_is_left_alone(place: Place, name: str) -> None:
    place.mapping = {"world_size": 4, name: 2}
    assert run(place.woven()) == 0
    assert [place.record(rank)["mode"] for rank in range(4)] == ["stock"] * 4
    assert place.record()["refused"][0]["reason"] == f"{name} is 2: tensor parallelism only is served"


def test_padded_inputs_are_left_alone(place: Place) -> None:
    assert run(place.woven("--remove_input_padding", "disable")) == 0
    assert "remove_input_padding is off" in place.record()["refused"][0]["reason"]
    assert place.all_reduces() == 4


# ---- profiles


def optima(place: Place, name: str = "input_ids") -> list[int]:
    return [profile[name]["opt"][0] for profile in place.told()["profiles"]]


def test_profiles_are_optimised_for_a_step_that_is_split(place: Place) -> None:
    assert run(place.woven()) == 0
    assert optima(place) == optima(place, "position_ids") == [96]
    assert place.record()["opt_num_tokens"] == [96]


def test_the_tasks_of_prompt_tokens_have_the_same_optimum(place: Place) -> None:
    assert run(place.woven("--max_prompt_embedding_table_size", "16")) == 0
    assert optima(place, "tasks") == optima(place) == [96]


def test_an_input_without_ranges_counts_nothing(place: Place) -> None:
    assert run(place.woven("--fast_build")) == 0
    assert optima(place) == [96]
    assert "managed_constant_0" not in place.told()["profiles"][0]


def test_a_stock_build_keeps_its_optimum(place: Place) -> None:
    assert run(place.words()) == 0
    assert optima(place) == [8]


def test_an_optimum_of_the_users_is_kept(place: Place) -> None:
    assert run(place.woven("--opt_num_tokens", "64")) == 0
    assert optima(place) == [64]


def test_an_optimum_of_the_users_that_is_not_split_is_refused(place: Place) -> None:
    with pytest.raises(UserError, match="its optimum of 4 tokens in 4 sequences is not split") as raised:
        run(place.woven("--opt_num_tokens", "4"))
    assert "opt_num_tokens" in raised.value.fix
    assert not (place.out / "rank0.engine").exists()


def test_each_of_several_profiles(place: Place) -> None:
    assert run(place.woven("--multiple_profiles", "enable", "--max_num_tokens", "96")) == 0
    assert optima(place) == place.record()["opt_num_tokens"] == [64, 96]


@pytest.mark.parametrize("fewer", [True, False])
def test_limits_above_all_profiles_are_said_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, fewer: bool
) -> None:
    """Of inputs that count sequences the limit is the first one's, and the weave reads another."""
    from tensorrt_llm import builder

    forward = builder.__dict__["_forward"]

    def disagreeing(model: Any, network: Any, build_config: Any) -> None:
        forward(model, network, build_config)
        for ranges in network._inputs["context_lengths"].profiles:
            ranges.max[0] -= fewer

    monkeypatch.setitem(builder.__dict__, "_forward", disagreeing)
    assert run(place.woven()) == 0
    assert [place.record(rank)["mode"] for rank in range(2)] == ["weave"] * 2
    said = [line for line in capsys.readouterr().err.splitlines() if "limits: " in line]
    line = "max_batch_size 8 is above the 7 of the largest profile (input context_lengths): give it 7"
    assert said == ([f"tokenweave:   limits: warning ({line})"] if fewer else [])


# ---- records


def test_config_json_says_what_was_done(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(place.woven()) == 0
    document = json.loads((place.out / "config.json").read_text())
    assert {"version", "pretrained_config", "build_config"} <= set(document)
    assert document["tokenweave"] == place.record()
    record = document["tokenweave"]
    assert record["table"]["sha256"] == small_table(place.config, 2).sha256
    assert (record["library"], record["tensorrt_llm"], record["tensorrt"]) == (__version__, "1.1.0", "10.9.0")
    capsys.readouterr()
    assert main(["inspect", str(place.out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokenweave"] == record


def test_a_dry_run_says_what_would_be_done(place: Place) -> None:
    assert run(place.woven("--dry_run")) == 0
    assert place.record()["mode"] == "weave"
    assert not (place.out / "rank0.engine").exists()


def test_ranks_that_differ_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    known = rank_build.tuning_table

    def other(request: Any, kind: Any) -> Any:
        chosen = known(request, kind)
        other = chosen.table.model_copy(update={"min_tokens": 2})
        return replace(chosen, table=other) if request.rank == 1 else chosen

    monkeypatch.setattr(rank_build, "tuning_table", other)
    with pytest.raises(TokenWeaveError, match="table differs between rank 0 and rank 1"):
        run(place.woven())


def test_a_build_that_never_calls_the_hooks_is_no_success(place: Place) -> None:
    from tensorrt_llm import builder

    builder.__dict__["_build"] = lambda model, build_config: builder.__dict__["_Engine"](
        config=model._double_config, build_config=build_config, engine=None
    )
    with pytest.raises(TokenWeaveError, match="without calling optimize or build_engine"):
        run(place.woven())


def test_everything_is_put_back(place: Place) -> None:
    from tensorrt_llm import builder
    from tensorrt_llm.commands import build

    def taken() -> list[Any]:
        functions = [build.parallel_build, build.build_and_save, builder.optimize]
        return [*functions, builder.Builder.build_engine]

    before = taken()
    assert run(place.woven()) == 0
    assert taken() == before
    with pytest.raises(UserError):
        run(place.woven("--opt_num_tokens", "4"))
    assert taken() == before


def test_no_network_is_held_when_its_engine_is_written(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorrt_llm import builder

    networks, alive = [], list[bool]()
    forward, save = builder.__dict__["_forward"], builder.__dict__["_Engine"].double_save

    def noting(model: Any, network: Any, build_config: Any) -> None:
        networks.append(weakref.ref(network))
        forward(model, network, build_config)

    def saving(self: Any, folder: Path) -> None:
        alive.append(networks[-1]() is not None)
        save(self, folder)

    monkeypatch.setitem(builder.__dict__, "_forward", noting)
    monkeypatch.setattr(builder.__dict__["_Engine"], "double_save", saving)
    assert run(place.woven()) == 0
    assert alive == [False, False]


# ---- releases


@pytest.mark.parametrize(
    ("version", "reason"), [("0.16.0", "is too old"), ("1.3.0rc1", "cannot build TensorRT engines any more")]
)
def test_releases_that_are_refused(
    tmp_path: Path, version: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path, tiny(), 2)
    with trtllm_double.imported(trtllm_double.environment(tmp_path, version)):
        assert main(["trtllm-build", *place.woven()]) == 2
        assert "tensorrt_llm" not in sys.modules
    assert f"release {version} {reason}: >= 0.17, < 1.3 is needed" in capsys.readouterr().err


def test_no_tensorrt_llm_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not installed for this Python"):
        run(Place(tmp_path, tiny(), 2).woven())
    assert surface.load.cache_info().currsize == 0


@pytest.mark.parametrize("words", [[], ["--version"], ["--plugin", "tokenweave"]])
def test_leaving_the_plugin_out_does_not_install_tensorrt_llm(words: list[str]) -> None:
    with pytest.raises(UserError, match="is not installed for this Python") as raised:
        run(words)
    assert raised.value.fix == "pip install 'tensorrt_llm>=0.17,<1.3'"


def test_a_table_that_cannot_be_read_is_said_first() -> None:
    with pytest.raises(UserError, match=r"nope\.json: cannot be read"):
        run(["--plugin", "tokenweave", "--tokenweave_table", "nope.json"])


def test_no_plugin_library(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_tokenweave.trtllm.hooks.find_library", lambda _: None)
    with pytest.raises(UserError) as raised:
        run(place.woven())
    assert raised.value.where == "libtokenweave_trt.so"
