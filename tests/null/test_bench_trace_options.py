"""The options of `bench trace`, and what they make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.trace import sized

from trtllm_tokenweave.bench.trace_run import TraceArguments, check_arguments, read_bench
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import preset
from trtllm_tokenweave.table import default_table
from trtllm_tokenweave.waves import table_key


def test_arguments_become_a_bench(tmp_path: Path) -> None:
    arguments = TraceArguments("llama-3.3-70b", 8, chunks=(1024, 4096))
    made = read_bench(arguments, Mapping(2, 1, 2))
    limits = made.engines.limits
    assert (limits.max_batch_size, limits.max_num_tokens) == (64, 4096)
    assert limits.max_seq_len == max(r.total for r in made.trace.requests)
    assert (made.engines.config.num_hidden_layers, made.engines.config.vocab_size) == (8, 8192)
    assert not made.tuned
    assert made.tail
    assert not made.engines.multiple_profiles
    assert not read_bench(replace(arguments, tail=False), Mapping(2, 1, 2)).tail
    assert read_bench(replace(arguments, multiple_profiles=True), Mapping(2, 1, 2)).engines.multiple_profiles
    assert list(made.columns()) == ["stock", "peer", "fuse_only", "even_split", "no_comm"]
    file = tmp_path / "table.json"
    default_table(table_key(preset("llama-3.3-70b"), 2)).save(file)
    tabled = read_bench(replace(arguments, table=file, min_tokens=512), Mapping(2, 1, 2))
    assert tabled.tuned
    assert tabled.engines.weave.table.min_tokens == 512
    assert tabled.columns()["even_split"].prefix(sized(1000)) == 512
    assert made.columns()["even_split"].prefix(sized(1000)) == 1000
    with pytest.raises(UserError, match="made for tp_size 2, but 4 is needed"):
        read_bench(replace(arguments, table=file), Mapping(4, 0, 4))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_ranks_columns_of_the_vocabulary_are_a_vocabulary(size: int) -> None:
    """The engine without communication puts out these alone."""
    config = read_bench(TraceArguments("llama-3.3-70b", 2), Mapping(size, 0, size)).engines.config
    columns = config.local(size).vocab_size
    assert config.model_copy(update={"vocab_size": columns}).local(size).padded_vocab_size == columns


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--chunks", "1,x"], "--chunks: '1,x' is no list of numbers"),
        (["--chunks", "1024,32"], "--chunks: max_num_tokens 32 is less than max_batch_size 64"),
        (["--chunks", "512"], "--chunks: no step of up to 512 tokens is split"),
        (["--max-batch-size", "2048"], "--chunks: max_num_tokens 1024 is less than max_batch_size 2048"),
        (["--ctas", "7"], "bench trace: ctas"),
        (["--preset", "nothing"], "preset: no preset called 'nothing'"),
        (["--preset", "llama-2-7b"], "--preset: a request has 8192 tokens, the model 4096 positions"),
        (["--engines", "woven"], "--engines: woven is no list with stock in it"),
        (["--table", "nope.json"], "nope.json: cannot be read"),
        (["--layers", "81"], "--layers: 81, but the model has 80"),
        (["--requests", "0"], "'--requests'"),
        (["--rounds", "0"], "'--rounds'"),
        (["--seed", "-1"], "'--seed'"),
        (["-o", "/nowhere/x.json"], "/nowhere/x.json: the folder /nowhere does not exist"),
    ):
        assert main(["bench", "trace", *words, "--json"]) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert message in f"{error['where']}: {error['what']}"


def test_steps_that_are_never_split_need_no_table_that_splits() -> None:
    check_arguments(TraceArguments("llama-3.3-70b", 8, chunks=(512,), engines=("stock", "fuse_only")))
