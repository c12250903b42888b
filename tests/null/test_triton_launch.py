"""Triton's model repositories and the start of its servers, with stand-ins for mpirun and tritonserver."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.fake_tritonserver import server_words

from trtllm_tokenweave.cli.app import main
from trtllm_tokenweave.triton.repository import read_repository


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    assert main(["triton", "repo", str(folder)]) == 0
    return folder


@pytest.fixture
def start(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return server_words(tmp_path, repository, monkeypatch)


def _engine(tmp_path: Path, **plugin: Any) -> Path:
    engine = tmp_path / "engine"
    engine.mkdir(exist_ok=True)
    build = {"max_batch_size": 48, "plugin_config": plugin}
    (engine / "config.json").write_text(json.dumps({"build_config": build}), encoding="utf-8")
    return engine


def _templates(tmp_path: Path) -> Path:
    """The form of TensorRT-LLM's templates."""
    folder = tmp_path / "templates"
    for name, text in {
        "tensorrt_llm/config.pbtxt": 'backend: "${triton_backend}"\nmax_batch_size: ${triton_max_batch_size}\n'
        "model_transaction_policy { decoupled: ${decoupled_mode} }\n"
        'parameters { key: "gpt_model_path" value { string_value: "${engine_dir}" } }\n'
        'parameters { key: "x" value { string_value: "${enable_chunked_context} ${sink_token_length}" } }\n'
        "# ${a_comment}\n",
        "tensorrt_llm/1/model.py": "'${engine_dir} stays here'\n",
        "preprocessing/config.pbtxt": 'backend: "python"\nname: "${tokenizer_dir}"\n'
        "count: ${preprocessing_instance_count}\n",
        "ensemble/config.pbtxt": 'platform: "ensemble"\n',
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def _fill(tmp_path: Path, *words: str) -> list[str]:
    (tmp_path / "tokenizer").mkdir(exist_ok=True)
    given = ["--templates", str(_templates(tmp_path)), "--engine", str(tmp_path / "engine")]
    return ["triton", "fill", str(tmp_path / "filled"), *given, "--tokenizer", str(tmp_path / "tokenizer"), *words]


# ---- repositories


def test_a_folder_with_something_in_it_is_left_alone(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (repository / "tokenweave" / "config.pbtxt").read_bytes()
    assert main(["triton", "repo", str(repository), "--max-tokens", "3"]) == 2
    assert "is not empty. Fix: give a new folder" in capsys.readouterr().err
    assert (repository / "tokenweave" / "config.pbtxt").read_bytes() == before


def test_templates_are_filled_from_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = _engine(tmp_path, use_paged_context_fmha=True)
    assert main(_fill(tmp_path, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["left"] == ["sink_token_length"]
    text = (tmp_path / "filled" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert text.splitlines()[:5] == [
        'backend: "tensorrtllm"',
        "max_batch_size: 48",
        "model_transaction_policy { decoupled: true }",
        f'parameters {{ key: "gpt_model_path" value {{ string_value: "{engine}" }} }}',
        'parameters { key: "x" value { string_value: "true ${sink_token_length}" } }',
    ]
    assert (tmp_path / "filled" / "tensorrt_llm" / "1" / "model.py").read_text() == "'${engine_dir} stays here'\n"
    models = {model.name: model.on_all_ranks for model in read_repository(tmp_path / "filled")}
    assert models == {"ensemble": False, "preprocessing": False, "tensorrt_llm": True}


def test_values_of_the_command_line_come_first(tmp_path: Path) -> None:
    _engine(tmp_path)
    assert main(_fill(tmp_path, "--set", "triton_max_batch_size=7", "--set", "sink_token_length=a=b")) == 0
    text = (tmp_path / "filled" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert "max_batch_size: 7\n" in text
    assert '"false a=b"' in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "x"], "--set x: has no ="),
        (["--set", "wrong=1"], "--set wrong: is no placeholder of these templates"),
        (["--templates", "/nowhere"], "/nowhere: holds no tensorrt_llm/config.pbtxt"),
        (["--tokenizer", "/nowhere"], "/nowhere: is no folder"),
        (["--engine", "/nowhere"], "/nowhere/config.json: there is no such file, so the folder is no engine of"),
    ],
)
def test_templates_that_cannot_be_filled(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _engine(tmp_path)
    assert main(_fill(tmp_path, *words)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "filled").exists()


@pytest.mark.parametrize("char", ['"', "\\", "\n", "\x1b", "\x7f", "ö"], ids=ascii)
@pytest.mark.parametrize("option", ["--engine", "--tokenizer", "--set=sink_token_length", "--set=engine_dir"])
def test_values_that_templates_cannot_hold(
    tmp_path: Path, option: str, char: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = tmp_path / f"a{char}b"
    _engine(tmp_path).rename(value)
    _engine(tmp_path)
    assert main(_fill(tmp_path, f"{option}={value}")) == 2
    said = capsys.readouterr().err
    assert f"error: {option.replace('=', ' ')}{'=' if '=' in option else ' '}{tmp_path}/a" in said
    assert f"b: holds {char!r}, which Triton cannot read there. Fix: choose one of ASCII characters" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "filled").exists()


def test_an_engine_that_another_value_replaces_may_have_any_path(tmp_path: Path) -> None:
    _engine(tmp_path).rename(tmp_path / 'a"b')
    assert main(_fill(tmp_path, "--engine", str(tmp_path / 'a"b'), "--set", "engine_dir=/engine of all")) == 0
    text = (tmp_path / "filled" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert 'string_value: "/engine of all"' in text


@pytest.mark.parametrize("folder", ["sp ace", "ünï", "a;b"])
def test_filled_repositories_whose_path_triton_cannot_read(
    tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _engine(tmp_path)
    words = _fill(tmp_path)
    words[2] = str(tmp_path / folder)
    assert main(words) == 2
    assert f"{tmp_path / folder}: holds " in capsys.readouterr().err
    assert not (tmp_path / folder).exists()


@pytest.mark.parametrize("value", ["-5", "", "many", "1.5", "1 }"])
@pytest.mark.parametrize("name", ["triton_max_batch_size", "preprocessing_instance_count"])
def test_values_that_must_be_numbers(tmp_path: Path, name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    _engine(tmp_path)
    assert main(_fill(tmp_path, "--set", f"{name}={value}")) == 2
    said = capsys.readouterr().err
    ours = {"triton_max_batch_size": 48, "preprocessing_instance_count": 1}[name]
    assert f"--set {name}: {value!r} is no whole number of 0 or more. Fix: as in --set {name}={ours}\n" in said
    assert not (tmp_path / "filled").exists()


def test_values_in_strings_and_words_are_left_to_triton(tmp_path: Path) -> None:
    _engine(tmp_path)
    words = _fill(tmp_path, "--set", "triton_max_batch_size=0", "--set", "max_beam_width=", "--set", "decoupled_mode=0")
    with (tmp_path / "templates" / "ensemble" / "config.pbtxt").open("a") as config:
        config.write('name: "a \\"${max_beam_width}\\""\n')
    assert main(words) == 0
    assert 'name: "a \\"\\""' in (tmp_path / "filled" / "ensemble" / "config.pbtxt").read_text()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"build_config": {"max_batch_size": "many"}}'])
def test_what_trtllm_build_did_not_write(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (_engine(tmp_path) / "config.json").write_text(text, encoding="utf-8")
    assert main(_fill(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "config.json: is no engine's of trtllm-build: it is no JSON with build_config" in said
    assert "Error" not in said


def test_a_value_that_must_be_given_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _engine(tmp_path)
    words = _fill(tmp_path)
    (tmp_path / "templates" / "ensemble" / "config.pbtxt").write_text('platform: "ensemble"\nsize: ${some_size}\n')
    assert main(words) == 2
    assert "${some_size} has no value. Fix: fill it: triton fill --set some_size=VALUE" in capsys.readouterr().err
    assert main([*words, "--set", "some_size=1"]) == 0


@pytest.mark.parametrize("char", [" ", "ö", "$"], ids=ascii)
def test_servers_of_a_repository_whose_path_triton_cannot_read(
    start: list[str], repository: Path, tmp_path: Path, char: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"a{char}b").mkdir()
    moved = repository.rename(tmp_path / f"a{char}b" / "repository")
    (tmp_path / "link").symlink_to(moved)  # it is its end that Triton is given
    for given in (moved, tmp_path / "link"):
        start[2] = str(given)
        assert main([*start, "--dry-run"]) == 2
        said = capsys.readouterr().err
        assert f"b/repository: holds {char!r}, which Triton cannot read there. Fix: choose one of ASCII" in said
        assert len(said.splitlines()) == 1


def test_servers_of_a_model_whose_values_triton_cannot_read(
    start: list[str], repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = repository / "tokenweave" / "config.pbtxt"
    before = f"{config.read_text()}# Größe\n"
    config.write_text(before, encoding="utf-8")
    assert main([*start, "--dry-run"]) == 0  # a comment
    config.write_text(f'{before}parameters {{ key: "a#" value {{ string_value: "/mö del" }} }}\n', encoding="utf-8")
    assert main([*start, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert f"{config}: /mö del: holds 'ö', which Triton cannot read there. Fix: choose one of ASCII" in said
    config.write_text(config.read_text().replace('backend: "python"', 'backend: "onnxruntime"'), encoding="utf-8")
    assert main([*start, "--dry-run", "--rank-model", "tokenweave", "--no-preload"]) == 0


# ---- servers


def test_the_command_that_would_be_started(
    start: list[str], repository: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*start, "-n", "3", "--server-arg=--log-verbose=1", "--dry-run", "--address", "0.0.0.0"]) == 0
    said = shlex.split(capsys.readouterr().out)
    parts = " ".join(said[said.index(str(tmp_path / "mpirun")) :]).split(" : ")
    assert len(parts) == 3
    region = f"--backend-config=python,shm-region-prefix-name=tokenweave_{os.getpid()}_"
    for rank, part in enumerate(parts):
        assert f"-n 1 {tmp_path / 'tritonserver'} --model-repository={repository}" in part
        assert f"{region}{rank}_" in part
        assert "--log-verbose=1" in part
        assert ("--load-model=tokenweave" in part) == ("--allow-http=false" in part) == (rank > 0)
        assert ("--http-address=0.0.0.0" in part) == (rank == 0)
    assert not list((tmp_path / "shm").iterdir())  # nothing ran


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({}, 0),
        ({"STOP_CODE": "3"}, 1),
        # Stopped before it is ready, when a server still dies of the signal.
        ({"STOP_CODE": "3", "DEAF": "1"}, 0),
        # A proxy that nothing of this machine is to be asked through.
        ({"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}, 0),
    ],
    ids=["clean", "failing", "early", "proxy"],
)
def test_servers_run_until_they_are_stopped(
    start: list[str],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    code: int,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = ""

    def stop() -> None:
        nonlocal said
        end = time.monotonic() + 60
        while len(list((tmp_path / "shm").iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        while "DEAF" not in variables and "ready after" not in said and time.monotonic() < end:
            time.sleep(0.02)
            said += capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGTERM)

    # Where the launcher ended early, the signal must not reach the tests.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    stopper = threading.Thread(target=stop)
    stopper.start()
    found = main(start)
    stopper.join()
    signal.signal(signal.SIGTERM, before)
    said += capfd.readouterr().err
    assert found == code
    assert ("ready after" in said) == ("DEAF" not in variables)
    assert ("the servers ended with code 3; their last messages say why" in said) == bool(code)
    assert f"http 127.0.0.1:{start[start.index('--http-port') + 1]}" in said or "DEAF" in variables
    assert not list((tmp_path / "shm").iterdir())


@pytest.mark.parametrize(
    ("variable", "value", "words", "message"),
    [
        ("EARLY", "5", [], "the servers ended with code 5 before they were ready"),
        ("EARLY", "0", [], "the servers ended with code 0 before they were ready"),
        ("DEAF", "1", ["--ready-seconds", "0.2"], "the servers were not ready within 0.2 s"),
    ],
)
def test_servers_that_do_not_come_up(
    start: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert main([*start, *words]) == 1
    assert message in capfd.readouterr().err
    assert not list((tmp_path / "shm").iterdir())


@pytest.mark.parametrize(
    ("says", "end"),
    [
        (
            'I1130 stub: "TritonModelException: rank 0, tp_size: is 9. Fix: at most 8\\n\\nAt:\\n  /model.py(64)"\n'
            "TritonModelException: another",
            ": rank 0, tp_size: is 9. Fix: at most 8",
        ),
        ("tokenweave: error: rank 1 hangs; the server is going down", ": rank 1 hangs"),
        ("some error: of another program", "; their last messages say why"),
    ],
)
def test_the_last_line_has_the_first_error_of_a_rank(
    start: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], says: str, end: str
) -> None:
    monkeypatch.setenv("EARLY", "1")
    monkeypatch.setenv("SAYS", says)
    assert main(start) == 1
    lines = capfd.readouterr().err.splitlines()
    # The ranks may end before the launcher has seen them.
    found = re.fullmatch(
        r"(error: the servers ended with code 1 before they were ready)(?: \(first .*?\))?(.*)", lines[-1]
    )
    assert found is not None, lines[-1]
    assert found[2] == end
    assert lines.count(says.splitlines()[0]) == 2  # what each rank says is still there


@pytest.mark.parametrize("orchestrator", [False, True])
def test_as_many_ranks_as_the_engine_is_built_for(
    start: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    orchestrator: bool,
) -> None:
    engine = _engine(tmp_path)
    assert main(_fill(tmp_path)) == 0
    start[2] = str(tmp_path / "filled")
    words = [*start, "--dry-run", "--no-preload", "-n", "3"]
    assert main(words) == 0  # an engine that does not say it
    document = json.loads((engine / "config.json").read_text())
    document["pretrained_config"] = {"mapping": {"world_size": 2}}
    (engine / "config.json").write_text(json.dumps(document), encoding="utf-8")
    if orchestrator:
        monkeypatch.setenv("TRTLLM_ORCHESTRATOR", "1")
    capsys.readouterr()
    assert main(words) == (0 if orchestrator else 2)
    what = f"{tmp_path / 'filled' / 'tensorrt_llm'}: {engine}: is built for 2 ranks, but 3 are to be started. Fix: -n 2"
    assert (what in capsys.readouterr().err) != orchestrator
    assert main([*words, "-n", "2"]) == 0


def test_as_many_ranks_as_our_engine_is_built_for(
    start: list[str], repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / 'an "engine"'
    engine.mkdir()
    (engine / "config.json").write_text('{"tp_size": 2}', encoding="utf-8")
    config = repository / "tokenweave" / "config.pbtxt"
    said = str(engine).replace('"', '\\"')
    config.write_text(
        f'{config.read_text()}parameters {{ key: "engine_dir" value {{ string_value: "{said}" }} }}\n', encoding="utf-8"
    )
    assert main([*start, "--dry-run", "-n", "3"]) == 2
    assert f"{engine}: is built for 2 ranks, but 3 are to be started. Fix: -n 2" in capsys.readouterr().err
    assert main([*start, "--dry-run"]) == 0


def test_a_taken_port_is_named(start: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main([*start, "--grpc-port", port]) == 2
    assert f"--grpc-port {port}: cannot be used on 127.0.0.1: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("one", "other"), [("http", "grpc"), ("http", "metrics"), ("grpc", "metrics")], ids=lambda name: name
)
def test_ports_must_differ(start: list[str], one: str, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = start[start.index(f"--{one}-port") + 1]
    assert main([*start, f"--{other}-port", port]) == 2
    assert f"--{other}-port {port}: is the --{one}-port too. Fix: choose another" in capsys.readouterr().err
    assert main([*start, "--dry-run"]) == 0


def test_servers_are_not_started_by_a_rank(
    start: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert main([*start, "--dry-run"]) == 2
    assert "cannot start ranks below an mpirun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tritonserver", "/nowhere/tritonserver"], "/nowhere/tritonserver: is no program on this machine"),
        (["--mpirun", "/nowhere/mpirun"], "/nowhere/mpirun: is no program on this machine"),
        (["--ready-seconds", "-1"], "--ready-seconds"),
        (["--stop-seconds", "-1"], "--stop-seconds"),
        (["--rank-model", "other"], "--rank-model: 'other' is not one of tokenweave"),
        (["--preload", "/nowhere.so"], "/nowhere.so: is not there, and without it TensorRT-LLM's runtime"),
        (["--preload", "auto", "--no-preload"], "--preload auto: goes without --no-preload. Fix: give one of the two"),
    ],
)
def test_what_cannot_be_started(
    start: list[str], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*start, *words]) == 2
    assert message in capsys.readouterr().err


def test_it_must_be_clear_what_all_ranks_load(start: list[str], repository: Path) -> None:
    (repository / "tokenweave").rename(repository / "mine")
    assert main([*start, "--dry-run"]) == 2
    assert main([*start, "--dry-run", "--rank-model", "mine"]) == 0
    assert main([*start, "--dry-run", "-n", "1"]) == 0


def test_tensorrt_llms_models_are_given_our_plugins(
    start: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _engine(tmp_path)
    assert main(_fill(tmp_path)) == 0
    start[2] = str(tmp_path / "filled")
    library = tmp_path / "libtokenweave_preload.so"
    monkeypatch.setattr("trtllm_tokenweave.triton.launch.find_library", {"tokenweave_preload": library}.get)
    assert main([*start, "--dry-run"]) == 2
    assert "libtokenweave_preload.so: is not there" in capsys.readouterr().err
    library.touch()
    assert main([*start, "--dry-run"]) == 0
    command = capsys.readouterr().out
    assert command.count(f"-x LD_PRELOAD={library} ") == 2
    assert command.count("--load-model=tensorrt_llm") == 1
    assert main([*start, "--dry-run", "--preload", "auto"]) == 0
    assert capsys.readouterr().out.count(f"-x LD_PRELOAD={library} ") == 2
    assert main([*start, "--dry-run", "--no-preload"]) == 0
    assert "LD_PRELOAD" not in capsys.readouterr().out
