"""`trtllm-tokenweave build` and `run` on a fake GPU, whose engines count up: what is written, said and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.fake_decoder import DecoderMachine
from support.fake_gpu import FakeRuntime, install_tensorrt
from support.models import tiny
from support.stack import Stack, options, table

from trtllm_tokenweave import decoder
from trtllm_tokenweave.builder import Plan
from trtllm_tokenweave.checkpoint import GgufCheckpoint, Tokenizer, require_tokenizer, smollm2_gguf
from trtllm_tokenweave.checkpoint.tokenizer import load_folder_tokenizer
from trtllm_tokenweave.cli import build as build_command
from trtllm_tokenweave.cli import ranks
from trtllm_tokenweave.cli import run as run_command
from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.comm import MPI_TIMEOUT, CommBackend, LocalComm
from trtllm_tokenweave.device import cudart
from trtllm_tokenweave.engine import config_file, manifest_file, plan_file
from trtllm_tokenweave.model_config import PRESETS
from trtllm_tokenweave.passes import weave
from trtllm_tokenweave.table import Bucket, TableKey, TableRow, TuningTable

REGISTER = decoder.register_decoder_plugins
TINY = ["--preset", "tiny", "--max-num-tokens", "64", "--max-seq-len", "128"]
MODEL = tiny(
    hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_size=64, dtype="bfloat16", vocab_size=97
).model_copy(update={"num_hidden_layers": 1})


class Cli:
    """The command line in this process."""

    def __init__(self, machine: DecoderMachine, capsys: pytest.CaptureFixture[str]) -> None:
        self.machine, self.capsys = machine, capsys

    def __call__(self, *words: Any) -> dict[str, Any]:
        """The document of a command that succeeds."""
        code = main([str(word) for word in (*words, "--json")])
        said = self.capsys.readouterr()
        assert code == 0, said.err
        document: dict[str, Any] = json.loads(said.out)
        return document

    def refused(self, *words: Any) -> str:
        """The error of a command that must end with 2: one line on stderr besides progress."""
        assert main([str(word) for word in words]) == 2
        said = self.capsys.readouterr()
        assert not said.out
        (line,) = (line for line in said.err.splitlines() if " s  " not in line)
        return line


@pytest.fixture
def cli(trt: ModuleType, cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(PRESETS, "tiny", MODEL)
    machine = DecoderMachine(trt, cuda)
    monkeypatch.setattr(build_command, "build_decoder", machine.build)
    monkeypatch.setattr(decoder, "register_decoder_plugins", lambda _size: None)
    monkeypatch.setattr(run_command, "counters", dict)
    return Cli(machine, capsys)


@pytest.fixture
def engine(cli: Cli, tmp_path: Path) -> Path:
    """A folder without a tokenizer."""
    cli("build", *TINY, "-o", tmp_path / "engine")
    return tmp_path / "engine"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The checkpoint's own."""
    return require_tokenizer(GgufCheckpoint(smollm2_gguf()))


def test_a_checkpoint_is_built_and_run_from_its_folder_alone(cli: Cli, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "engine"
    built = cli("build", smollm2_gguf(), "--layers", 1, "--max-seq-len", 256, "-o", folder)
    assert (built["tp_size"], built["mode"], built["sites"]) == (1, "stock", 0)
    assert built["refused"] == ["it has no AllReduce layer, so there is nothing to fuse (tp_size 1?)"]
    (job,) = cli.machine.builds
    assert (job.config.dtype, job.config.num_hidden_layers, job.options.max_seq_len) == ("bfloat16", 1, 256)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "rank0.engine", "rank0.json", "tokenizer"]

    ran = cli("run", folder, "--prompt", "Hello", "--prompt", "Good morning", "--max-new-tokens", 5, "--ignore-eos")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    last = tokenizer.encode(text)[-1]
    want = [last + 1 + i for i in range(5)]
    assert ran["prompts"][0]["tokens"] == want
    assert ran["prompts"][0]["text"] == tokenizer.decode(want)
    assert (ran["new_tokens"], ran["tp_size"], ran["mode"]) == (10, 1, "stock")
    assert ran["tokens_per_second"] > 0
    assert sum(ran["steps"].values()) == 5
    assert ran["steps"]["stock graph"] == 2
    assert ran["step_seconds"].keys() == ran["steps"].keys()
    assert 0 < sum(ran["step_seconds"].values()) < ran["seconds"]
    assert any(reason.startswith("the engine is built stock: it has no AllReduce") for reason in ran["reasons"])


def test_the_saved_tokenizer_is_the_checkpoints(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = tokenizer
    first.save(tmp_path)
    again = load_folder_tokenizer(tmp_path)
    assert again is not None
    assert again.eos_ids == first.eos_ids
    messages = [{"role": "user", "content": "What is 12 + 30?\n"}]
    assert again.apply_chat_template(messages) == first.apply_chat_template(messages)
    for text in (first.apply_chat_template(messages), "café 1234\n\n  x", "<|im_end|>"):
        assert again.encode(text) == first.encode(text)
        assert again.encode(text, add_bos=True) == first.encode(text, add_bos=True)
        assert again.decode(first.encode(text)) == first.decode(first.encode(text))


def test_text_for_people(cli: Cli, engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(engine), "--prompt-ids", "5,6", "--prompt-ids", "40", "--max-new-tokens", "3"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[:2] == ["[0] 7,8,9", "[1] 41,42,43"]
    assert "tokens/s (tp_size 1, engine stock)" in said.out
    assert re.search(r"steps: 3 stock eager \(\d+\.\d\d ms each\)", said.out)
    assert "loading" in said.err


def test_what_the_network_is_built_for(cli: Cli, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    document = {"key": {"tp_size": 1, "hidden_size": 128, "dtype": "bfloat16"}, "granularity": 16, "min_tokens": 64}
    TuningTable.model_validate_json(json.dumps(document)).save(table)
    words = ["--table", table, "--min-tokens", 32, "--mode", "fuse", "--no-split-attention", "--gemm", "budget"]
    cli("build", *TINY, *words, "--max-batch-size", 4, "--tokens-per-block", 64, "-o", tmp_path / "e")
    cli("build", *TINY, *words[:4], "--multiple-profiles", "-o", tmp_path / "two")
    job, two = cli.machine.builds
    assert [len(built.settings().profiles) for built in (job, two)] == [1, 2]
    assert cli("run", tmp_path / "two", "--prompt-ids", "5,6", "--max-new-tokens", 2)["prompts"][0]["tokens"] == [7, 8]
    assert (job.mode, job.weave.split_attention, job.weave.gemm) == ("fuse", False, "budget")
    assert (job.weave.table.granularity, job.weave.table.min_tokens) == (16, 32)
    assert (job.options.max_batch_size, job.options.tokens_per_block) == (4, 64)
    model = json.loads(config_file(tmp_path / "e").read_text())["model"]
    assert (model["max_batch_size"], model["max_num_tokens"], model["max_seq_len"]) == (4, 64, 128)
    assert (model["tokens_per_block"], model["wanted"], model["source"]) == (
        64,
        "fuse",
        "random weights of tiny",
    )


BAD_BUILDS: dict[str, tuple[Sequence[Any], str]] = {
    "no model": ([], "error: build: give one of MODEL and --preset"),
    "two models": (["x.gguf", *TINY], "error: build: give one of MODEL and --preset"),
    "preset": (["--preset", "nothing"], "error: preset: no preset called 'nothing'"),
    "checkpoint": (["/nowhere"], "error: /nowhere: does not exist"),
    "layers": (["--preset", "smollm2-135m", "--layers", 31], "error: --layers: 31, but the model has 30"),
    "ranks": ([*TINY, "--tp", 2], "error: --tp: 2, but 1 process runs. Fix: mpirun -n 2 trtllm-tokenweave"),
    "float32": ([*TINY, "--dtype", "float32"], "error: dtype: attention has no float32. Fix: choose float16"),
    "mode": ([*TINY, "--mode", "woven"], "error: --mode: 'woven' is neither weave, fuse nor stock"),
    "gemm": ([*TINY, "--gemm", "x"], "error: --gemm: 'x' is neither table, trt nor budget"),
    "length": ([*TINY[:-1], 9000], "error: --max-seq-len: 9000 is above the model's 128"),
    "block": ([*TINY, "--tokens-per-block", 128], "error: limits: max_num_tokens 64 is less than max_batch_size 8"),
    "no power": ([*TINY, "--tokens-per-block", 48], "error: option tokens_per_block: 48 is no power of two"),
    "no table": ([*TINY, "--table", "/nowhere.json"], "error: /nowhere.json: "),
}


@pytest.mark.parametrize("case", BAD_BUILDS)
def test_builds_that_are_refused(cli: Cli, tmp_path: Path, case: str) -> None:
    words, message = BAD_BUILDS[case]
    assert cli.refused("build", *words, "-o", tmp_path / "engine").startswith(message)
    assert not list(tmp_path.iterdir())
    assert not cli.machine.builds


@pytest.mark.parametrize(
    ("last", "mode", "said"), [(48, "weave", True), (64, "weave", False), (48, "fuse", False), (48, "stock", False)]
)
def test_steps_above_the_tables_rows_are_said_of_an_engine_that_splits(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    last: int,
    mode: str,
    said: bool,
) -> None:
    rows = (TableRow(tokens=Bucket(lo=1, hi=last), mode="weave"),)
    key = {"tp_size": 1, "hidden_size": 128, "dtype": "bfloat16"}
    TuningTable(key=TableKey.model_validate(key), granularity=16, min_tokens=1, rows=rows).save(tmp_path / "table.json")

    def build(job: decoder.DecoderBuild, comm: CommBackend) -> Plan:
        """With what becomes of two ranks' network: that of one has nothing to fuse."""
        plan = cli.machine.build(job, comm)
        if job.mode == "stock":
            return plan
        two = options(2, 0, table=table(2, rows=rows), max_num_tokens=64, split=job.mode == "weave")
        return replace(plan, result=weave(Stack().build(), two))

    monkeypatch.setattr(build_command, "build_decoder", build)
    words = ("build", *TINY, "--table", tmp_path / "table.json", "--mode", mode, "-o", tmp_path / "e")
    assert main([str(word) for word in words]) == 0
    captured = capsys.readouterr()
    assert f": {mode}, {0 if mode == 'stock' else 4} sites" in captured.out
    assert ("table: steps of 49 to 64 tokens are above its rows" in captured.err) is said


def test_a_table_of_another_model_is_refused(cli: Cli, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    document = {"key": {"tp_size": 1, "hidden_size": 4096, "dtype": "bfloat16"}}
    TuningTable.model_validate_json(json.dumps(document)).save(table)
    said = cli.refused("build", *TINY, "--table", table, "-o", tmp_path / "engine")
    assert "key.hidden_size: made for hidden_size 4096, but 128 is needed" in said


def test_no_output_folder(cli: Cli) -> None:
    assert cli.refused("build", *TINY) == "error: --output: is missing. Fix: name the folder for the engines: -o DIR"


BAD_RUNS: dict[str, tuple[Sequence[Any], str]] = {
    "no prompt": ([], "error: --prompt: is missing. Fix: give --prompt TEXT"),
    "no tokenizer": (
        ["--prompt", "x"],
        "error: --prompt: the engine's folder has no tokenizer. Fix: give",
    ),
    "no ids": (["--prompt-ids", "1,x"], "error: --prompt-ids: '1,x' is no list of numbers"),
    "vocabulary": (["--prompt-ids", "97"], "error: prompt 0: token 97 is outside the vocabulary of 97"),
    "too long": (
        ["--prompt-ids", ",".join(["1"] * 100)],
        "error: prompt 0: 100 tokens and 64 new ones exceed max_seq_len 128. Fix: shorten the prompt",
    ),
    "full cache": (["--prompt-ids", "1", "--num-blocks", 1], "error: prompt 0: needs 3 KV-cache blocks, there are 1"),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_runs_that_are_refused(cli: Cli, engine: Path, case: str) -> None:
    words, message = BAD_RUNS[case]
    assert cli.refused("run", engine, *words).startswith(message)


def _edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no engine": (lambda f: config_file(f).unlink(), "config.json: is missing. Fix: give the folder of a whole engine"),
    "corrupt engine": (lambda f: plan_file(f, 0).write_bytes(b"plan 9 of 1 layers"), "plan_sha256 is "),
    "cut engine": (lambda f: plan_file(f, 0).write_bytes(b"pl"), "plan_bytes is "),
    "corrupt manifest": (lambda f: manifest_file(f, 0).write_text("{"), "rank0.json: is not JSON"),
    "missing rank": (lambda f: manifest_file(f, 0).unlink(), "rank0.json: is missing"),
    "other GPU": (lambda f: _edit(manifest_file(f, 0), gpu="GPU 2"), "gpu is GPU 2, but Test GPU is needed here"),
    "other TensorRT": (lambda f: _edit(manifest_file(f, 0), tensorrt="10.7.0"), "tensorrt is 10.7.0, but 10.6.0 is"),
    "other library": (lambda f: _edit(manifest_file(f, 0), library="0.0"), "library is 0.0, but"),
    "other tp_size": (lambda f: _edit(config_file(f), tp_size=2), "tp_size is 2, but 1 ranks run. Fix: start 2"),
    "foreign": (lambda f: _edit(config_file(f), model={}), "model: is empty. Fix: build the engine with"),
    "damaged model": (lambda f: _edit(config_file(f), model={"source": "x"}), "config.json: model: config: missing"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_engines_that_are_refused(cli: Cli, engine: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    damage(engine)
    assert message in cli.refused("run", engine, "--prompt-ids", "1")


@pytest.mark.parametrize("command", ["build", "run"])
@pytest.mark.parametrize("lack", ["GPU", "cuda-bindings", "TensorRT", "libraries"])
def test_a_machine_that_lacks_something_says_what(
    cli: Cli, engine: Path, cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch, command: str, lack: str
) -> None:
    message = {
        "GPU": "error: CUDA: no GPU can be used (cudaGetDevice: error 35). Fix: run this on a machine with an NVIDIA",
        "cuda-bindings": "error: CUDA: cuda-bindings cannot be imported",
        "TensorRT": "error: TensorRT: ",
        "libraries": f"error: {engine / 'nothing.so'}: cannot be loaded",
    }[lack]
    if lack == "GPU":
        cuda.fails["cudaGetDevice"] = 35
    elif lack == "cuda-bindings":
        cudart.cache_clear()
        monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    elif lack == "TensorRT":
        install_tensorrt(monkeypatch, None)
    else:
        monkeypatch.setattr(decoder, "register_decoder_plugins", REGISTER)
        monkeypatch.setenv("TOKENWEAVE_TRT_LIBRARY", str(engine / "nothing.so"))
    words = ["build", *TINY, "-o", engine] if command == "build" else ["run", engine, "--prompt-ids", "1"]
    assert cli.refused(*words).startswith(message)


def test_ranks_wait_long_for_the_files_of_others(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model's take minutes, and longer on one rank than on another."""
    limits: list[float] = []

    def mpi_comm(timeout: float) -> LocalComm:
        limits.append(timeout)
        return LocalComm.group(1)[0]

    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "MpiComm", mpi_comm)
    assert ranks.start_ranks().size == 1
    assert limits == [ranks.FILE_TIMEOUT]
    assert ranks.FILE_TIMEOUT >= 10 * MPI_TIMEOUT
