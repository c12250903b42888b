"""`trtllm-tokenweave inspect ENGINE`: what saved engines were built for, and the tuning table that they carry."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trtllm_tokenweave.cli.console import make_console
from trtllm_tokenweave.cli.table import print_json, print_table
from trtllm_tokenweave.errors import UserError


def is_engine(path: Path) -> bool:
    """Whether a path is a folder, one rank's engine in a folder, or its manifest."""
    if path.is_dir() or path.suffix == ".engine":
        return True
    return _rank(path) is not None and path.with_suffix(".engine").exists()


def _rank(path: Path) -> int | None:
    found = re.fullmatch(r"rank(\d+)\.(engine|json)", path.name)
    return int(found.group(1)) if found else None


def show_engine(path: Path, as_json: bool) -> None:
    """Print a folder's engines, or one of them; the plans themselves are not read, and no GPU is needed.

    Of engines that ``trtllm-build`` made: what this package has recorded in their ``config.json``.

    Raises:
        UserError: a file is missing, damaged, or does not belong to the others.
    """
    from trtllm_tokenweave.engine import EngineConfig, config_file, manifest_file, trtllm_config
    from trtllm_tokenweave.manifest import Manifest, check_manifest, check_ranks, read_file, sha256

    folder = path if path.is_dir() else path.parent
    rank = None if path.is_dir() else _rank(path)
    if rank is None and not path.is_dir():
        raise UserError("is not named rank0.engine", where=str(path), fix="give the engine's folder")
    stock = trtllm_config(folder)
    if stock is not None:
        _show_trtllm(path, config_file(folder), stock, as_json)
        return
    config = read_file(config_file(folder), EngineConfig)
    ranks = range(config.tp_size) if rank is None else (rank,)
    manifests = [read_file(manifest_file(folder, r), Manifest) for r in ranks]
    check_ranks([manifest.shared() for manifest in manifests], str(folder))
    most = config.model.get("max_num_tokens")
    # An engine that is fused only, or stock, splits no step of any size.
    split = manifests[0].mode == "weave"
    beyond = config.table.beyond_rows(most if isinstance(most, int) else None) if split else ""
    packed = sha256(config.table.pack())
    for manifest in manifests:
        check_manifest(manifest, {"table_sha256": packed}, str(manifest_file(folder, manifest.rank)))
    if as_json:
        shown = [manifest.model_dump(mode="json") for manifest in manifests]
        table = {"sha256": config.table.sha256, **config.table.model_dump(mode="json")}
        document = {"engine": str(path), "model": config.model, "manifests": shown, "table": table}
        print_json(document | {"beyond_rows": beyond or None})
        return
    console = make_console()
    first = manifests[0]
    lines = [
        f"{path}: {first.mode}, tp_size {first.tp_size}, {first.dtype}",
        f"built on {first.gpu} (compute capability {first.compute_capability}, CUDA driver {first.cuda_driver}) with "
        f"TensorRT {first.tensorrt}, trtllm-tokenweave {first.library}",
        *(f"rank {m.rank}: {m.plan_bytes / 2**20:.1f} MiB, sha256 {m.plan_sha256}" for m in manifests),
    ]
    console.print("\n".join(lines), markup=False, highlight=False)
    print_table(console, config.table, "tuning table")
    if beyond:
        console.print(f"table: {beyond}", markup=False, highlight=False)


def _show_trtllm(path: Path, file: Path, config: dict[str, Any], as_json: bool) -> None:
    from trtllm_tokenweave.engine import SERVE_TRTLLM
    from trtllm_tokenweave.table.files import table_error
    from trtllm_tokenweave.trtllm.record import KEY, Record

    if KEY not in config:
        what = "is of an engine that trtllm-build made without this package: there is nothing of it to show"
        raise UserError(what, where=str(file), fix=f"build it with --plugin tokenweave, or {SERVE_TRTLLM}")
    try:
        record = Record.model_validate(config[KEY])
    except ValidationError as error:
        raise table_error(error, f"{file}: {KEY}") from error
    if as_json:
        print_json({"engine": str(path), KEY: record.model_dump(mode="json")})
        return
    attention = f", attention {record.attention}" if record.attention else ""
    lines = [
        f"{path}: made by trtllm-build, {record.mode}, {record.sites} sites fused{attention}",
        f"built with TensorRT-LLM {record.tensorrt_llm}, TensorRT {record.tensorrt}, "
        f"trtllm-tokenweave {record.library}",
    ]
    if record.table is not None:
        optima = ", ".join(map(str, record.opt_num_tokens))
        lines += [
            f"steps up to {record.max_num_tokens} tokens and {record.max_batch_size} sequences, optimised for {optima}",
            f"tuning table: {record.table.source}, min_tokens {record.table.min_tokens}, sha256 {record.table.sha256}",
        ]
        lines += [f"table: {record.table.beyond_rows}"] if record.table.beyond_rows else []
    lines += [f"{left.stage}: {left.where}: {left.reason}" for left in record.refused]
    make_console().print("\n".join([*lines, SERVE_TRTLLM]), markup=False, highlight=False)
