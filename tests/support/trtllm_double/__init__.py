"""A stand-in for TensorRT-LLM's build: the names of `trtllm_tokenweave.trtllm.surface.SURFACE`, and no others.

The package ``tensorrt_llm`` in this folder has the call order, signatures, environment variable and files of
TensorRT-LLM 0.17 to 1.2 (``commands/build.py``, ``builder.py``, ``network.py``, ``functional.py``), as
docs/compatibility.md says where they were read. What it builds is a `RecordedNetwork`, which it saves beside an empty
engine. Any other name that is asked for raises `Unlisted`, which no ``except Exception`` and no default of ``getattr``
catches.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from trtllm_tokenweave import tensorrt_module
from trtllm_tokenweave.model_config import ModelConfig
from trtllm_tokenweave.trtllm import surface

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]


def write_metadata(folder: Path, version: str) -> Path:
    """What pip leaves of an installed TensorRT-LLM: goes on the module path beside `FOLDER`."""
    info = folder / f"tensorrt_llm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
    return folder


def source_tree(folder: Path) -> Path:
    """A folder with a tensorrt_llm that cannot be imported, as people work in."""
    package = folder / "TensorRT-LLM" / "tensorrt_llm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('nothing is built here')\n")
    return package.parent


def environment(folder: Path, version: str = "1.1.0") -> dict[str, str]:
    """Variables of a process that finds the double as TensorRT-LLM ``version``, and a library that is never loaded."""
    library = folder / "libtokenweave_trt.so"
    library.touch()
    paths = (FOLDER, write_metadata(folder / "site", version), ROOT)
    values = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TOKENWEAVE_TRT_LIBRARY": str(library)}
    return {**os.environ, "TRTLLM_DOUBLE_VERSION": version, **values}


@contextmanager
def imported(values: Mapping[str, str]) -> Iterator[None]:
    """Let this process find the double by `environment`, and forget it afterwards."""
    variables, path = dict(os.environ), list(sys.path)
    modules = _forget()
    os.environ.update(values)
    sys.path[:0] = values["PYTHONPATH"].split(os.pathsep)[:2]
    try:
        yield
    finally:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(variables)
        _forget()
        sys.modules.update(modules)


def _forget() -> dict[str, ModuleType]:
    """Take out of this process what is imported of TensorRT and TensorRT-LLM, and return it."""
    for cached in (surface.load, tensorrt_module.tensorrt, tensorrt_module.logger):
        cached.cache_clear()
    # "models" is what trtllm-build calls a model class file.
    names = [name for name in sys.modules if name.partition(".")[0] in ("tensorrt", "tensorrt_llm", "models")]
    return {name: sys.modules.pop(name) for name in names}


def write_checkpoint(
    folder: Path, config: ModelConfig, tp_size: int, architecture: str | None = None, **mapping: int
) -> Path:
    """The config.json of a checkpoint of TensorRT-LLM's; there are no weights, and none are asked for.

    The double takes its layers from model.json beside it, where neither ``architecture`` nor ``mapping`` stand.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = "architecture dtype hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_size"
    more = "intermediate_size vocab_size max_position_embeddings norm_epsilon rotary_base"
    document: dict[str, Any] = {name: getattr(config, name) for name in f"{names} {more}".split()}
    document |= {
        "hidden_act": "swiglu" if config.moe else "silu",
        "position_embedding_type": "rope_gpt_neox",
        "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1, "cp_size": 1},
    }
    if config.qkv_bias:
        document["attn_bias"] = True
    if config.moe is not None:
        document["moe"] = {"num_experts": config.moe.num_experts, "top_k": config.moe.top_k, "normalization_mode": 1}
    (folder / "model.json").write_text(json.dumps(document))
    document |= {"architecture": architecture or config.architecture, "mapping": document["mapping"] | mapping}
    (folder / "config.json").write_text(json.dumps(document))
    return folder
