"""Writes engine_folder.json: which manifests are refused and why, and the steps that prompts are run in.

The C++ headers are tested against the same file. Usage:

    PYTHONPATH=tests python -m vectors.make_engine_vectors            write it
    PYTHONPATH=tests python -m vectors.make_engine_vectors --check    exit 1 when it is stale
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.vectors import write_or_check

from trtllm_tokenweave import __version__
from trtllm_tokenweave.device import Gpu
from trtllm_tokenweave.engine import EngineConfig, config_file, load_config, manifest_file, plan_file, read_manifest
from trtllm_tokenweave.engine_runner import recurring
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.kv_cache import KvCacheConfig
from trtllm_tokenweave.manifest import Manifest, TensorSpec, sha256, this_process
from trtllm_tokenweave.model_config import ModelConfig, preset
from trtllm_tokenweave.runner import Array, GenerationLimits, Generator, StepInputs
from trtllm_tokenweave.table import TableKey, default_table

PATH = Path(__file__).with_name("engine_folder.json")

GPU = Gpu("NVIDIA H200", "9.0", "13.0")
TENSORRT = "10.13.3.9"
POOL = 4096
"""Address of the KV cache."""

MANIFEST = Manifest(
    library=__version__,
    tensorrt=TENSORRT,
    cuda_driver=GPU.driver,
    gpu=GPU.name,
    compute_capability=GPU.compute_capability,
    tp_size=2,
    rank=1,
    dtype="bfloat16",
    mode="weave",
    table_sha256=sha256(b"table"),
    tensors=(
        TensorSpec(name="input_ids", mode="INPUT", dtype="INT32", shape=(-1,), profiles=(((1,), (8,), (64,)),)),
        TensorSpec(name="logits", mode="OUTPUT", dtype="FLOAT", shape=(-1, 96), profiles=()),
    ),
    plan_sha256=sha256(b"plan"),
    plan_bytes=4,
)
#: Fields that are changed one at a time; each has to be refused.
CHANGES: dict[str, Any] = {
    "format_version": 2,
    "library": "0.0.1",
    "tensorrt": "10.6.0",
    "gpu": "NVIDIA A100",
    "compute_capability": "8.0",
    "tp_size": 4,
    "rank": 0,
}


def refusal(folder: Path, rank: int, tp_size: int) -> str:
    """What Python says of a folder, without the folder's own name."""
    try:
        load_config(folder, tp_size)
        read_manifest(folder, rank, this_process(GPU, TENSORRT, rank, tp_size))
    except UserError as error:
        return str(error).replace(f"{folder}/", "")
    return ""


def folders() -> dict[str, Any]:
    """Files of an engine's folder, and changes of them with the error that each gives."""
    table = default_table(TableKey(tp_size=2, hidden_size=4096, dtype="bfloat16"))
    config = json.loads(EngineConfig(tp_size=2, table=table, model={"layers": 1}).text())
    manifest = json.loads(MANIFEST.text())
    cases: list[dict[str, Any]] = [{"file": "rank1.json", "change": {field: value}} for field, value in CHANGES.items()]
    cases += [{"file": "config.json", "change": change} for change in ({"tp_size": 3}, {"format_version": None})]
    cases += [{"file": file, "change": None} for file in ("rank1.json", "config.json")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def error_of(case: dict[str, Any]) -> str:
            files = {"config.json": config, "rank1.json": manifest}
            if case["change"] is None:
                del files[case["file"]]
            else:
                files[case["file"]] = files[case["file"]] | case["change"]
            for path in (config_file(folder), manifest_file(folder, 1)):
                path.unlink(missing_ok=True)
                if path.name in files:
                    path.write_text(json.dumps(files[path.name]), encoding="utf-8")
            return refusal(folder, 1, 2)

        good = {"file": "config.json", "change": {}}
        assert error_of(good) == ""
        cases = [{**case, "error": error_of(case)} for case in cases]
    return {"config": config, "manifest": manifest, "plan": plan_file(Path(), 1).name, "refused": cases}


class Pool:
    """Sizes and an address of a KV cache that nobody reads."""

    def __init__(self, config: KvCacheConfig) -> None:
        self.config = config

    @property
    def pointers(self) -> NDArray[np.int64]:
        """See `kv_cache.CachePool`."""
        return np.array([[POOL, 0]], np.int64)


def next_token(token: int, end: int, vocab_size: int) -> int:
    """What stands for a model: the token that follows `token`, the last one of a row that ends at `end`."""
    return (token * 31 + end) % vocab_size


def generation(config: ModelConfig, tp_size: int, limits: GenerationLimits, prompts: list[list[int]]) -> dict[str, Any]:
    """Inputs of every step that a generator runs, and the tokens that it makes."""
    steps: list[dict[str, Any]] = []

    def run(inputs: list[StepInputs]) -> Array:
        given = recurring(inputs[0], limits.max_seq_len)
        steps.append(
            {n: {"shape": x.shape, "dtype": x.dtype.name, "values": x.ravel().tolist()} for n, x in given.items()}
        )
        rows = given["last_token_ids"] - 1
        logits = np.zeros((len(rows), config.vocab_size), np.float32)
        for row, (token, end) in enumerate(zip(given["input_ids"][rows], given["sequence_length"], strict=True)):
            logits[row, next_token(int(token), int(end), config.vocab_size)] = 1
        return logits

    generator = Generator(
        run, [Pool(limits.cache(config, tp_size))], tp_size=tp_size, vocab_size=config.vocab_size, limits=limits
    )
    result = generator.generate(prompts)
    model = {
        "config": config.model_dump(mode="json"),
        "max_batch_size": limits.max_batch_size,
        "max_num_tokens": limits.max_num_tokens,
        "max_seq_len": limits.max_seq_len,
        "tokens_per_block": limits.tokens_per_block,
    }
    return {
        "tp_size": tp_size,
        "model": model,
        "cache": {"num_kv_heads": limits.cache(config, tp_size).num_kv_heads},
        "max_new_tokens": limits.max_new_tokens,
        "eos": sorted(limits.eos_ids),
        "prompts": prompts,
        "tokens": result.tokens,
        "steps": steps,
    }


def generations() -> list[dict[str, Any]]:
    """Prompts that need chunks, that wait for others to end, and that end early; and other splits of KV heads."""
    small = preset("smollm2-135m").model_copy(update={"num_hidden_layers": 2, "vocab_size": 101})
    prompts = [[(7 * i + 3 * j) % 101 for j in range(length)] for i, length in enumerate((5, 19, 1, 12))]
    limits = GenerationLimits(
        max_num_tokens=16,
        max_batch_size=3,
        max_seq_len=32,
        max_new_tokens=4,
        tokens_per_block=8,
        eos_ids=frozenset({1}),
    )
    shared = small.model_copy(update={"num_attention_heads": 8, "num_key_value_heads": 2})
    one = GenerationLimits(max_num_tokens=8, max_batch_size=1, max_seq_len=300, max_new_tokens=1, tokens_per_block=8)
    return [
        generation(small, 2, limits, prompts),
        generation(shared, 4, one, [[1, 2]]),
        generation(shared, 1, one, [[100]]),
    ]


def text() -> str:
    """The document as it stands in the file."""
    document = {
        "about": "engine folders and steps of decoders; written by make_engine_vectors.py",
        "here": {"gpu": GPU.name, "compute_capability": GPU.compute_capability, "tensorrt": TENSORRT, "pool": POOL},
        "folders": folders(),
        "generations": generations(),
    }
    return json.dumps(document, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PATH, text()))
