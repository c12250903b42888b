"""Each command of the documentation is run: here, by another test or check, or on GPUs. Each option it names exists."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from typer.main import get_command

import trtllm_tokenweave
from trtllm_tokenweave.cli.app import COMMANDS, PROG, build_app, main
from trtllm_tokenweave.predict.__main__ import main as predict_main

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".", "docs", "plugins", "plugins/*", "tuning/tables")
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md")}
#: What has to be run also where a sentence names it; other programs only where a block shows them.
PROGRAMS = re.compile(
    rf"(mpirun -n \w+ )?{PROG} |(\./)?build_scripts/|python |pip install [.'-]|cmake |trtllm-build ARGS"
)
NO_COMMANDS = ("struct ", "tokenweave: rank 0")  # blocks of C++, and of what a command prints

#: Run by `test_commands`, in a folder that has the files, and what they print.
HERE = {
    ".venv/bin/trtllm-tokenweave --help": "Usage: trtllm-tokenweave",
    "plan --preset llama-3.3-70b --tp 8": "8192+8192",
    "trtllm-tokenweave plan --preset llama-3.3-70b --tp 8 --predict --machine h100-multimem": "h100-multimem",
    "trtllm-tokenweave table from-paper FILE -o OUT --tp 8 --hidden 8192 --dtype bfloat16 "
    '--gpu "NVIDIA H100 80GB HBM3"': "wrote OUT: 2 rows",
    "trtllm-tokenweave table show FILE": "tp_size 2, hidden_size 8192, bfloat16, dense",
    "trtllm-tokenweave bench plot docs/results/kernel_tp2.json": "wrote docs/results/kernel_tp2.svg",
    "trtllm-tokenweave bench plot llama70b_tp2.measurements.json --report tuning.html": "wrote tuning.html",
    "trtllm-tokenweave doctor": "numpy",
    "trtllm-tokenweave doctor --json": '"version"',
    "trtllm-tokenweave shim install": "trtllm-build",
    "trtllm-tokenweave triton launch --help": "--ready-seconds",
}

#: Patterns of the other commands: the file that runs them, or says why none does, and words of it.
ON_EVERY_MACHINE = {
    r"(\./)?build_scripts/demo( --no-report)?": "tests/null/test_scripts.py: def test_first_run_sets_up",
    r"(\./)?build_scripts/test": ".ci/run: build_scripts/test",
    r"build_scripts/fetch_sdk( flashinfer)?": "CMakeLists.txt: build_scripts/fetch_sdk",
    r"server=\$\(build_scripts/fetch_sdk tritonserver\)": "build_scripts/test: build_scripts/fetch_sdk tritonserver",
    r"build_scripts/build_flashinfer_peer build/.*": "tests/null/test_docs_scripts.py: def test_flashinfers_kernel",
    r"python build_scripts/api_reference FOLDER": "build_scripts/test: build_scripts/api_reference",
    r"pip install -e \.": "build_scripts/common.sh: pip_install -e",
    r"pip (install|wheel --no-deps) \.": "build_scripts/test: -m pip wheel .",
    r"SKBUILD_WHEEL_CMAKE=0 pip install \.": 'tests/null/test_packaging.py: SKBUILD_WHEEL_CMAKE="0"',
    r"pip install \. -C .*": "tests/null/test_docs_commands.py: def test_one_architecture",
    r"pip install '\S+'": "tests/null/test_docs_commands.py: def test_requirements",
    r"PREFIX=.*": "tests/null/test_docs_commands.py: def test_prefix",
    r"cmake (-S \.|--build) .*|ctest --test-dir build": "build_scripts/test: cmake -S . -B build",
    r"cmake (-S plugins/examples|--install build) .*": "tests/null/test_cpp_package.py: def example",
    r"LD_PRELOAD=\S+_preload.so server \.\.\.": "tests/cpp/preload/test_preload.cpp: LD_PRELOAD=",
    r"trtllm-tokenweave trtllm-build --\w+ .*": "tests/null/test_trtllm_options.py: def test_the_command_of_the",
    r"trtllm-tokenweave trtllm-build ARGS --plugin tokenweave": "tests/null/test_trtllm_build.py: def test_",
    r"trtllm-build ARGS --plugin tokenweave": "tests/null/test_trtllm_shim.py: *WEAVE",
    r"trtllm-build ARGS --model_cls_file .*": "tests/null/test_trtllm_processes.py: def test_an_unmodified_command",
    r"trtllm-tokenweave mpi-run -n \w( --preload auto)? -- .*": 'tests/null/test_launch.py: "--preload", "auto"',
    r"trtllm-tokenweave triton repo repository --engine \w+": 'tests/null/test_triton_repo.py: "--engine"',
    r"trtllm-tokenweave triton fill .* --tokenizer HF_FOLDER": "tests/null/test_triton_launch.py: def _fill",
    r"mpirun -x LD_PRELOAD=\S+ -n 1 tritonserver .*": "tests/null/test_triton_launch.py: -x LD_PRELOAD=",
    r"\S+( triton |/triton_)launch repository -n 2.*": "tests/serving/test_server.py: Server(",
    r"build_scripts/triton_repo repository --chat-template": "tests/serving/test_server.py: --chat-template",
    r"curl .*/v2/models/tokenweave/generate.*": "tests/serving/test_server.py: /v2/models/tokenweave/",
    r"curl .*/metrics.*": "tests/serving/test_server.py: /metrics",
    r"python -m trtllm_tokenweave.predict": "tests/null/test_predict_main.py: def test_writes_both",
    r"trtllm-tokenweave table check \S+ --here --preset \S+": 'tests/null/test_table_measured.py: "--here"',
    r"trtllm-tokenweave inspect ENGINE": "tests/null/test_cli_inspect_engine.py: def test_a_folder_shows",
}
ON_GPUS = {
    r"mpirun -n 2 trtllm-tokenweave build \S+ -o engine.*": 'tests/gpu/test_run_engine.py: "build"',
    r"(mpirun -n 2 )?trtllm-tokenweave run \w+ --prompt .*": 'tests/gpu/test_run_engine.py: "run"',
    r"mpirun -n 2 build/example/run_engine .*": "tests/gpu/test_run_engine.py: PROGRAM",
    r"mpirun -n 2 trtllm-tokenweave tune .*": "tests/gpu/test_tune.py: def test_a_small_table_is_tuned_and_checked",
    r"trtllm-tokenweave bench kernel .*": "docs/benchmarks.md: which has since become",
    r"(trtexec|polygraphy|python -c \"import tensorrt) .*": "docs/cpp.md: None of the three is",
    r"trt\.get_plugin_registry\(\)\.load_library.*": "trtllm_tokenweave/plugin_library.py: registry.load_library",
    r"export NCCL_MULTI_RANK_GPU_ENABLE=1 .*": "tests/gpu/mpirun.py: NCCL_MULTI_RANK_GPU_ENABLE=1",
    r"nvidia-cuda-mps-control -d": "docs/engines.md: under CUDA's MPS",
    r"python -c 'import tensorrt_llm'": "docs/compatibility.md: TensorRT-LLM cannot be installed",
}
PATTERNS = ON_EVERY_MACHINE | ON_GPUS

#: The commands whose options a page gives without their names; those of other pages may be any command's.
ABOUT = {
    "docs/tuning.md": ("tune",),
    "docs/engines.md": ("build", "run"),
    "docs/prediction.md": ("plan", "predict"),
    "docs/triton.md": ("triton", "mpi-run"),
    "docs/tables.md": ("table check",),
    "docs/benchmarks.md": ("bench e2e", "bench trace"),
    "docs/trtllm_build.md": ("shim install", "trtllm-build"),
}
#: TensorRT-LLM's own options.
OTHERS = {
    *("--build_config", "--fast_build", "--gemm_allreduce_plugin", "--input_timing_cache", "--kv_cache_type"),
    *("--model_cls_name", "--multiple_profiles", "--opt_num_tokens", "--remove_input_padding", "--strip_plan"),
    *("--use_paged_context_fmha", "--workers"),
}


# ---- the documents


def code(text: str) -> Iterator[tuple[bool, str]]:
    """Each line of a document's blocks (True), and the code inside its sentences (False)."""
    for token in MarkdownIt().enable("table").parse(text):
        shell = token.type == "code_block" or (token.type == "fence" and token.info in ("sh", "bash", "console"))
        if shell and not token.content.startswith(NO_COMMANDS):
            lines = re.sub(r"\s*\\\n\s*", " ", token.content).splitlines()
            yield from ((True, line) for line in (re.sub(r"(^|\s+)#\s.*", "", line).strip() for line in lines) if line)
        inline = (child.content for child in token.children or () if child.type == "code_inline")
        yield from ((False, " ".join(content.split())) for content in inline)


def all_code() -> list[tuple[str, bool, str]]:
    return [(page, block, line) for page, path in DOCUMENTS.items() for block, line in code(path.read_text())]


def to_run(block: bool, line: str) -> bool:
    """Whether it has to be run: what a block shows, and what a sentence gives with an option or an argument."""
    words = our_words(line)
    is_name = words is not None and ("..." in words or not resolve(words)[1])
    return block or (PROGRAMS.match(line) is not None and not is_name)


def run_nowhere(shown: set[str]) -> set[str]:
    results = {json.loads(path.read_text())["command"] for path in (ROOT / "docs" / "results").glob("*.json")}
    return {line for line in shown - set(HERE) - results if not any(re.fullmatch(p, line) for p in PATTERNS)}


# ---- the command line


@cache
def command_line() -> Any:
    """All of our commands, with `predict` for ``python -m trtllm_tokenweave.predict``."""
    app = build_app([command.name for command in COMMANDS])
    app.command("predict")(predict_main)
    return get_command(app)


def our_words(line: str) -> list[str] | None:
    """The words behind our program, or from the name of one of its commands on; None for another program's."""
    line = re.sub(r"^(\./)?build_scripts/(demo|triton)_?", rf"{PROG} \2 ", line)
    with contextlib.suppress(ValueError):  # a sentence's code may be a quotation mark
        words = shlex.split(re.sub(r"[][|]", " ", line))
        at = next((i + 1 for i, word in enumerate(words) if word.endswith(PROG)), 0)
        return words[at:] if at or words[0] in command_line().commands else None
    return None


def resolve(words: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """The innermost command of the words, and what follows."""
    command = command_line()
    while words and words[0] in getattr(command, "commands", ()):
        command, words = command.commands[words[0]], words[1:]
    return command, words


@cache
def options(name: str) -> set[str]:
    """Every option of a command, and of those below it."""
    command, _ = resolve(name.split())
    own = {"--help", *(option for param in command.params for option in (*param.opts, *param.secondary_opts))}
    if name == "trtllm-build":
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            main([name, "--help"])
        own.update(re.findall(r"^ +(--\w+)", text.getvalue(), re.MULTILINE))
    return own.union(*(options(f"{name} {below}".strip()) for below in getattr(command, "commands", ())))


def not_understood(page: str, line: str) -> str:
    """What our command line does not take of a page's code; empty where it takes all, or another program is called."""
    given = {word.partition("=")[0] for word in line.split() if re.match(r"--?[a-z]", word)}
    if line.startswith("-"):
        return " ".join(sorted(given - OTHERS.union(*map(options, ABOUT.get(page, ("",))))))
    words = our_words(line)
    if words is None or words[:1] == ["trtllm-build"]:
        return ""
    command, rest = resolve(words)
    if hasattr(command, "commands") and rest and not rest[0].startswith(("-", ".")):
        return f"no command {rest[0]}"
    if PROG in line and rest and "..." not in rest and "--help" not in rest:
        try:
            command.make_context(command.name, ["2" if word == "N" else word for word in rest]).close()
        except Exception as error:  # noqa: BLE001  # click's, of which typer brings its own
            return f"{type(error).__name__}: {error}"
    if "--" in words:  # another program's follow
        return ""
    return " ".join(sorted(given.intersection(words) - options(" ".join(words[: len(words) - len(rest)]))))


# ---- the tests


def test_every_command_is_run_somewhere() -> None:
    shown = {line for _, block, line in all_code() if to_run(block, line)}
    assert len(shown) > 80
    assert run_nowhere(shown) == set()
    assert set(HERE) - {line for _, _, line in all_code()} == set()
    assert [pattern for pattern in PATTERNS if not any(re.fullmatch(pattern, line) for line in shown)] == []


def test_a_command_that_nothing_runs_is_found_out() -> None:
    text = (
        "`trtllm-tokenweave run` says, and `trtllm-tokenweave shim status --json`:\n\n    ./build_scripts/test  # all\n"
    )
    text += "    mpirun -n 2 trtllm-tokenweave bench stack \\\n      --layers 4\n\n```sh\nrm file\n```\n"
    left = {"trtllm-tokenweave shim status --json", "mpirun -n 2 trtllm-tokenweave bench stack --layers 4", "rm file"}
    assert run_nowhere({line for block, line in code(text) if to_run(block, line)}) == left


def test_what_is_said_to_run_a_command_is_there() -> None:
    places = {evidence.partition(": ")[::2] for evidence in PATTERNS.values()}
    assert [(file, words) for file, words in places if words not in (ROOT / file).read_text()] == []


def test_every_command_and_option_exists() -> None:
    assert [(page, line, why) for page, _, line in all_code() if (why := not_understood(page, line))] == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--restrat", "--restrat"),
        ("--prompt TEXT", "--prompt"),  # of a command that the page is not about
        ("bench plot --reprot", "--reprot"),
        ("trtllm-tokenweave tune -o t.json --layers four", "BadParameter"),
        ("trtllm-tokenweave bench plot --hidden 8192", "MissingParameter"),
        ("trtllm-tokenweave shim instal", "no command instal"),
    ],
)
def test_what_does_not_exist_is_found_out(line: str, why: str) -> None:
    assert not_understood("docs/tuning.md", line).startswith(why)


@pytest.mark.parametrize("line", HERE)
def test_commands(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    shutil.copytree(ROOT / "docs/results", "docs/results", ignore=shutil.ignore_patterns("*.svg", "*.png"))
    shipped = ROOT / "tuning/tables/llama-3.3-70b_tp2_h200.json"
    shutil.copy(shipped.with_suffix(".measurements.json"), "llama70b_tp2.measurements.json")
    _, paper = re.findall(r"```json\n(.*?)```", DOCUMENTS["docs/tables.md"].read_text(), re.DOTALL)
    Path("FILE").write_text(paper if "from-paper" in line else shipped.read_text())
    words = our_words(line)
    assert words is not None
    assert main(words) == 0
    assert HERE[line] in capsys.readouterr().out


def test_prefix() -> None:
    (line,) = {line for _, _, line in all_code() if line.startswith("PREFIX=")}
    script = line.replace("python", shlex.quote(sys.executable)) + '; echo "$PREFIX"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{trtllm_tokenweave.__path__[0]}\n"


def test_requirements() -> None:
    """What pip is told to install are the package's extras, and the versions that these ask for."""
    asked = [Requirement(line) for line in requires("trtllm-tokenweave") or ()]
    named = [line.split("'")[1] for _, _, line in all_code() if line.startswith("pip install '")]
    extras = {extra for name in named if name.startswith(".") for extra in name[2:-1].split(",")}
    assert [extra for extra in extras if not any(f'extra == "{extra}"' in str(r.marker) for r in asked)] == []
    versions = {(r.name, r.specifier) for r in (Requirement(name) for name in named if not name.startswith("."))}
    assert len(versions) > 2
    assert versions <= {(r.name, r.specifier) for r in asked}


@pytest.mark.skipif(not (ROOT / "build/plugins/trt/libtokenweave_trt.so").exists(), reason="nothing is compiled here")
def test_one_architecture(tmp_path: Path) -> None:
    """All of `pip install . -C ...` but compiling: what would be compiled is for the one architecture."""
    (line,) = {line for _, _, line in all_code() if line.startswith("pip install . -C ")}
    name, _, value = line.split()[-1].partition("=")
    nothing = {"build.targets": "help", "install.components": "none", "build-dir": str(tmp_path / "build")}
    call = "import json, sys; from scikit_build_core.build import build_wheel as build; "
    call += "build(sys.argv[1], json.loads(sys.argv[2]))"
    command = [sys.executable, "-c", call, str(tmp_path), json.dumps({name: value, **nothing})]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    compiled = re.findall(r"code=\[(.*?)\]", (tmp_path / "build" / "build.ninja").read_text())
    assert set(compiled) == {"sm_90"}
