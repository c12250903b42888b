"""Tables that come with this package, for what has been measured; the default rule for all else, said aloud."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_tokenweave.libraries import PACKAGE, ROOT
from trtllm_tokenweave.table.files import load_table
from trtllm_tokenweave.table.measured import Here, check_measured, differences, layer_gemms, other_memory
from trtllm_tokenweave.table.model import ANY_GPU, TuningTable

if TYPE_CHECKING:
    from trtllm_tokenweave.model_config import ModelConfig

#: What a table's name ends in when it is not one, but holds the samples that it was made from.
MEASUREMENTS = ".measurements.json"
#: The same of the samples of a run that has not ended.
UNFINISHED = ".partial.json"


@dataclass(frozen=True)
class Chosen:
    """A table for a model, and where it comes from, for the user to read."""

    table: TuningTable
    said: str
    file: Path | None = None


def this_machine() -> Here:
    """GPU and TensorRT of this process.

    Raises:
        UserError: there is no GPU, or no TensorRT.
    """
    from trtllm_tokenweave.device import current_gpu
    from trtllm_tokenweave.tensorrt_module import tensorrt

    return Here(current_gpu().name, str(tensorrt().__version__))


def shipped_folder() -> Path:
    """Where the tables are: in the installed package, or in the source tree."""
    installed = PACKAGE / "tables"
    return installed if installed.is_dir() else ROOT / "tuning" / "tables"


def shipped_tables(folder: Path | None = None) -> dict[Path, TuningTable]:
    """All tables that come with this package, by file.

    Raises:
        UserError: one is damaged.
    """
    files = sorted((shipped_folder() if folder is None else folder).glob("*.json"))
    return {path: load_table(path) for path in files if not path.name.endswith((MEASUREMENTS, UNFINISHED))}


def choose_table(
    config: ModelConfig, tp_size: int, here: Here, *, given: Path | None = None, folder: Path | None = None
) -> Chosen:
    """The table for a model: the given one, else a shipped one that was made for it and holds here, else the rule.

    Args:
        config: The model.
        tp_size: Ranks.
        here: GPU and TensorRT, as far as they are known. A shipped table is taken for a known GPU only: it says nothing
            about others.
        given: A file that the user names.
        folder: Where shipped tables are looked for.

    Raises:
        UserError: the given table was made for something else, or is stale; tp_size cannot be served.
    """
    from trtllm_tokenweave.waves import default_table, gemm_shapes, table_key

    key = table_key(config, tp_size, gpu=here.gpu or ANY_GPU)
    here = replace(here, gemms=layer_gemms(gemm_shapes(config, tp_size)))
    if given is not None:
        table = load_table(given)
        table.check_key(key, where=str(given))
        check_measured(table, here, where=str(given))
        measured = table.source.measured
        texts = [table.source.kind, table.source.text, "" if measured is None else other_memory(measured, here)]
        return Chosen(table, f"table: {given} ({', '.join(text for text in texts if text)})", given)
    reasons, others = [], []
    for path, table in shipped_tables(folder).items():
        measured = table.source.measured
        if here.gpu is None or table.key != key:
            fits = table.key.model_copy(update={"gpu": key.gpu}) == key
            if fits and (measured is None or measured.gemms == here.gemms):
                others.append(table.key.gpu)
            continue
        stale = [] if measured is None else [*differences(measured, here), other_memory(measured, here)]
        if not any(stale):
            text = table.source.text if measured is None else f"{table.source.text}, TensorRT {measured.tensorrt}"
            return Chosen(table, f"table: {path.name}, which comes with this package ({text})", path)
        reasons.append(f"{path.name}: {'; '.join(text for text in stale if text)}")
    rule = default_table(config, tp_size)
    if not reasons:
        reasons.append(f"none was measured for {here.gpu or 'an unknown GPU'}, tp_size {tp_size}, these shapes")
        reasons += [f"there is one for {gpu}" for gpu in dict.fromkeys(others)]
    return Chosen(rule, f"no table fits ({'; '.join(reasons)}): {rule.source.text}")
