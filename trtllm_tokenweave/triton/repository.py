"""Triton model repositories: writing ours, filling TensorRT-LLM's templates, and reading what a server is to load."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_tokenweave.atomic import check_folder
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.triton.settings import Settings

MODEL = "tokenweave"
"""Name of the model that serves without TensorRT-LLM."""

#: Where NVIDIA's containers of Triton with TensorRT-LLM keep the templates.
CONTAINER_TEMPLATES = Path("/app/all_models/inflight_batcher_llm")

_MODEL_FILE = '''\
"""Triton's Python backend looks for the class here; it is the package's."""

from trtllm_tokenweave.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''

_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")

#: Strings of a config.pbtxt, and what is not to be taken for one.
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"|#.*')

_CONTROL = "".join(map(chr, (*range(32), 127)))

#: What a shell does not take as it is in a word without quotes: Triton starts the processes of its Python backend by
#: one, and the repository's path is such a word.
_SHELL = _CONTROL + " \"$&'()*;<>?[\\`{|"

#: What a string of a template does not take as it is.
_QUOTING = _CONTROL + '"\\'

#: The parameter with the engine's folder: ours, and that of TensorRT-LLM's backend.
_ENGINE = re.compile(
    r'key\s*:\s*"(?:engine_dir|gpt_model_path)"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"((?:[^"\\]|\\.)+)"'
)

#: Values of the templates' placeholders that fit every woven engine; the engine and the command line add the rest.
_TEMPLATE_VALUES = {
    "triton_backend": "tensorrtllm",
    "batching_strategy": "inflight_fused_batching",
    "max_queue_delay_microseconds": "0",
    "max_queue_size": "0",
    "max_beam_width": "1",
    "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1",
    "bls_instance_count": "1",
    "accumulate_tokens": "false",
    "exclude_input_in_output": "true",
    "skip_special_tokens": "true",
    "add_special_tokens": "true",
    "tensorrt_llm_model_name": "tensorrt_llm",
    "logits_datatype": "TYPE_FP32",
    "encoder_input_features_data_type": "TYPE_FP16",
    "prompt_embedding_table_data_type": "TYPE_FP16",
}


def check_characters(text: str, before: str = "", refused: str = "") -> None:
    """Refuse a path or a value that Triton would not read as it is.

    The Python of Triton's Python backend takes names of files for ASCII, whatever the locale.

    Args:
        text: The path, absolute, or the value.
        before: What an error says before it: the option or the file it comes from.
        refused: ASCII characters that its place cannot hold.

    Raises:
        UserError: it holds a character that is refused, or is not ASCII.
    """
    wrong = next((char for char in text if not char.isascii() or char in refused), None)
    if wrong is not None:
        raise UserError(
            f"holds {wrong!r}, which Triton cannot read there",
            where=f"{before}{text}",
            fix="choose one of ASCII characters without it",
        )


def write_repository(folder: Path, settings: Settings, *, streaming: bool) -> None:
    """Make a model repository with the model `tokenweave`.

    Args:
        folder: The repository; must be new or empty.
        settings: What its config.pbtxt says; paths are made absolute.
        streaming: Decoupled mode: any number of responses a request.

    Raises:
        UserError: the folder holds something, cannot be written, or has a path that Triton cannot read.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("trtllm_tokenweave", "templates"),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = _quoted
    parameters = {name: _text(value) for name, value in settings if value is not None}
    text = environment.get_template("triton_config.pbtxt.j2").render(streaming=streaming, parameters=parameters)
    _write(folder, {f"{MODEL}/config.pbtxt": text, f"{MODEL}/1/model.py": _MODEL_FILE})


def fill_templates(
    folder: Path, templates: Path, engine: Path, tokenizer: Path, values: Mapping[str, str], *, streaming: bool
) -> list[str]:
    """Make a model repository for TensorRT-LLM's backend from the templates of the installed version.

    Args:
        folder: The repository; must be new or empty.
        templates: Folder of the templates, with tensorrt_llm/config.pbtxt.
        engine: Folder that trtllm-build wrote.
        tokenizer: Folder of the Hugging Face tokenizer.
        values: More values of placeholders; they come first.
        streaming: Decoupled mode.

    Returns:
        Placeholders that were left as they are, inside strings: the backend takes its own defaults for them.

    Raises:
        UserError: a folder is not what it should be, a value names no placeholder or is none that its place can hold,
            or a placeholder that needs a value has none.
    """
    if not (templates / "tensorrt_llm" / "config.pbtxt").is_file():
        raise UserError(
            "holds no tensorrt_llm/config.pbtxt",
            where=str(templates),
            fix="give TensorRT-LLM's folder all_models/inflight_batcher_llm as --templates",
        )
    ours = _TEMPLATE_VALUES | _engine_values(engine) | {"decoupled_mode": _text(streaming)}
    ours |= {"engine_dir": str(engine.resolve()), "tokenizer_dir": str(tokenizer.resolve())}
    known = {**ours, **values}
    options = {"engine_dir": "--engine ", "tokenizer_dir": "--tokenizer "} | {name: f"--set {name}=" for name in values}
    for name, option in options.items():
        check_characters(known[name], option, _QUOTING)
    files: dict[str, str] = {}
    used: set[str] = set()
    left: set[str] = set()
    for path in sorted(p for p in templates.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        text = path.read_text(encoding="utf-8")
        if path.name == "config.pbtxt":
            used |= set(_PLACEHOLDER.findall(text)) & set(known)
            _check_numbers(text, ours, values)
            text = _PLACEHOLDER.sub(lambda match: known.get(match[1], match[0]), text)
            left |= _unfilled(text, str(path))
        files[str(path.relative_to(templates))] = text
    unknown = sorted(set(values) - used)
    if unknown:
        raise UserError(
            "is no placeholder of these templates", where=f"--set {unknown[0]}", fix="see their config.pbtxt"
        )
    if not tokenizer.is_dir():
        raise UserError("is no folder", where=str(tokenizer), fix="give the folder of the Hugging Face tokenizer")
    _write(folder, files)
    return sorted(left)


@dataclass(frozen=True)
class TritonModel:
    """A model of a repository.

    Attributes:
        name: Its folder.
        backend: What its config.pbtxt names.
        engine: The folder of the engine that it names, None where it names none.
    """

    name: str
    backend: str
    engine: Path | None = None

    @property
    def on_all_ranks(self) -> bool:
        """Whether every rank loads it; other models (tokenizers, ensembles) are rank 0's."""
        return self.name == MODEL or self.name == "tensorrt_llm" or self.backend == "tensorrtllm"


def read_repository(folder: Path) -> list[TritonModel]:
    """The models of a repository.

    Raises:
        UserError: it is none, or a model of it could not be loaded, or Triton cannot read a path.
    """
    fix = "make one with trtllm-tokenweave triton repo, or triton fill"
    if not folder.is_dir():
        raise UserError("is no folder", where=str(folder), fix=fix)
    check_characters(str(folder.resolve()), refused=_SHELL)
    models = []
    for config in sorted(folder.glob("*/config.pbtxt")):
        text = config.read_text(encoding="utf-8", errors="replace")
        _unfilled(text, str(config))
        found = re.search(r'^\s*(?:backend|platform)\s*:\s*"([^"]*)"', text, re.MULTILINE)
        if found is None:
            raise UserError("names no backend", where=str(config), fix='add backend: "python", or what it is')
        if found[1] == "python":
            for value in _STRING.findall(text):
                check_characters(value, f"{config}: ")
        versions = [path for path in config.parent.iterdir() if path.is_dir() and path.name.isdigit()]
        if not versions:
            raise UserError("has no version folder", where=str(config.parent), fix=f"make {config.parent / '1'}")
        engine = _ENGINE.search(re.sub(r"^\s*#.*", "", text, flags=re.MULTILINE))
        folder_of_engine = None if engine is None else Path(re.sub(r"\\(.)", r"\1", engine[1]))
        models.append(TritonModel(config.parent.name, found[1], folder_of_engine))
    if not models:
        raise UserError("holds no model: no folder of it has a config.pbtxt", where=str(folder), fix=fix)
    return models


def engine_ranks(engine: Path) -> int | None:
    """How many ranks an engine is built for, by its config.json (ours, or trtllm-build's); None where it does not say.

    What is wrong with the file, its server says.
    """
    try:
        config = json.loads((engine / "config.json").read_text(encoding="utf-8"))
        return int(config["tp_size"] if "tp_size" in config else config["pretrained_config"]["mapping"]["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _engine_values(engine: Path) -> dict[str, str]:
    """Values that TensorRT-LLM's engine folder decides."""
    path = engine / "config.json"
    fix = "give the folder that trtllm-build wrote"
    if not path.is_file():
        raise UserError("there is no such file, so the folder is no engine of trtllm-build", where=str(path), fix=fix)
    try:
        build = json.loads(path.read_text(encoding="utf-8"))["build_config"]
        chunked = bool(build.get("plugin_config", {}).get("use_paged_context_fmha"))
        return {"triton_max_batch_size": str(int(build["max_batch_size"])), "enable_chunked_context": _text(chunked)}
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=str(path), fix=fix) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = "is no engine's of trtllm-build: it is no JSON with build_config and its max_batch_size"
        raise UserError(what, where=str(path), fix=fix) from error


def _check_numbers(text: str, ours: Mapping[str, str], values: Mapping[str, str]) -> None:
    """Refuse a value that is no number where a number of ours stands outside strings."""
    for name in _PLACEHOLDER.findall(_STRING.sub("", text)):
        if ours.get(name, "").isdecimal() and not values.get(name, "0").isdecimal():
            raise UserError(
                f"{values[name]!r} is no whole number of 0 or more",
                where=f"--set {name}",
                fix=f"as in --set {name}={ours[name]}",
            )


def _unfilled(text: str, where: str) -> set[str]:
    """Placeholders inside strings. Those outside make a file that Triton cannot read: refused."""
    bare = _PLACEHOLDER.search(_STRING.sub("", text))
    if bare is not None:
        raise UserError(f"{bare[0]} has no value", where=where, fix=f"fill it: triton fill --set {bare[1]}=VALUE")
    return set(_PLACEHOLDER.findall(re.sub("#.*", "", text)))


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files beside the folder, then give them its name."""
    check_characters(str(folder.resolve()), refused=_SHELL)
    check_folder(folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError("is not empty", where=str(folder), fix="give a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as aside:
            made = Path(aside) / "repository"
            for name, text in files.items():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                (made / name).write_text(text, encoding="utf-8")
            # Triton wants a version folder of every model; those of ensembles are empty.
            for config in made.glob("*/config.pbtxt"):
                (config.parent / "1").mkdir(exist_ok=True)
            if folder.exists():
                folder.rmdir()
            shutil.move(made, folder)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror or error}", where=str(folder)) from error


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.resolve()) if isinstance(value, Path) else str(value)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def set_values(pairs: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` words as a mapping.

    Raises:
        UserError: one has no ``=``.
    """
    wrong = next((pair for pair in pairs if "=" not in pair), None)
    if wrong is not None:
        raise UserError("has no =", where=f"--set {wrong}", fix="as in --set max_queue_size=100")
    return {pair.partition("=")[0]: pair.partition("=")[2] for pair in pairs}
