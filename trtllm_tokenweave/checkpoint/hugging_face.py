"""A Hugging Face folder: config.json and one or several safetensors files of a Llama, Qwen2 or Mixtral model."""

from __future__ import annotations

from pathlib import Path

from trtllm_tokenweave.checkpoint.base import FullCheckpoint, Tokenizer
from trtllm_tokenweave.checkpoint.config_files import read_hugging_face_config
from trtllm_tokenweave.checkpoint.dtypes import Array
from trtllm_tokenweave.checkpoint.fields import Fields, read_json
from trtllm_tokenweave.checkpoint.names import LM_HEAD, check_all_read, check_shapes, full_shapes
from trtllm_tokenweave.checkpoint.safetensors_file import SafetensorsFiles
from trtllm_tokenweave.checkpoint.tokenizer import load_folder_tokenizer
from trtllm_tokenweave.errors import UserError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class HuggingFaceCheckpoint(FullCheckpoint):
    """Weights and tokenizer of a Hugging Face folder; every tensor's name, shape and dtype is checked on opening.

    Args:
        folder: Holds config.json and model.safetensors, or model.safetensors.index.json and the files it names.
        dtype: Give the weights in this dtype instead of the config's.
        architecture_hint: The architecture to take where config.json names none.

    Raises:
        UserError: Anything missing, damaged, misshapen or not served.
    """

    def __init__(self, folder: Path, *, dtype: str | None = None, architecture_hint: str | None = None) -> None:
        read = read_hugging_face_config(folder / "config.json", architecture_hint)
        self.folder = folder
        self._files = SafetensorsFiles(_weight_files(folder))
        tied = read.tie_word_embeddings and LM_HEAD not in self._files.shapes
        super().__init__(read.model.with_dtype(dtype), str(folder), tied_head=tied)
        expected = full_shapes(self.config)
        if tied:
            del expected[LM_HEAD]
        check_shapes(expected, self._files.shapes, self.source, places=self._files.places)
        check_all_read(expected, self._files.shapes, self.source, ignored=_unneeded)
        self._files.check_dtypes(list(expected))

    def read_full(self, name: str) -> Array:
        """See ``FullCheckpoint.read_full``."""
        return self._files.read(name)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of tokenizer.json, or None where the folder has none."""
        return load_folder_tokenizer(self.folder, self.config.vocab_size)


def _unneeded(name: str) -> bool:
    """Tensors outside of the language model, and rotary frequencies, which older files hold and the config gives."""
    return not name.startswith(("model.", "lm_head")) or name.endswith("rotary_emb.inv_freq")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.exists():
        if not (folder / _SINGLE).exists():
            raise UserError(
                f"has neither {_SINGLE} nor {_INDEX}",
                where=str(folder),
                fix="save the model with safe_serialization=True, or use --preset to plan without weights",
            )
        return [folder / _SINGLE]
    fields = Fields(read_json(index), str(index))
    weight_map = fields.section("weight_map")
    if weight_map is None:
        raise UserError("is missing", where=fields.where("weight_map"), fix="copy the model's own file again")
    names = {weight_map.text(tensor) for tensor in weight_map.data}
    for name in names:
        if Path(name).name != name:
            raise UserError(
                f"names {name!r}, which is outside the folder",
                where=fields.where("weight_map"),
                fix="name files of the same folder",
            )
    return [folder / name for name in sorted(names)]
