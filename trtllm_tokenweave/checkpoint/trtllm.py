"""A TensorRT-LLM checkpoint folder: config.json and one rank{r}.safetensors per rank, sharded when it was converted."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trtllm_tokenweave.checkpoint.base import Tokenizer
from trtllm_tokenweave.checkpoint.config_files import read_trtllm_config
from trtllm_tokenweave.checkpoint.dtypes import Array, convert, numpy_dtype
from trtllm_tokenweave.checkpoint.names import Shape, check_all_read, check_shapes, rank_shapes
from trtllm_tokenweave.checkpoint.safetensors_file import SafetensorsFiles
from trtllm_tokenweave.checkpoint.sharding import RankWeights, take_rows
from trtllm_tokenweave.checkpoint.tokenizer import load_folder_tokenizer
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping

_EMBEDDING = "transformer.vocab_embedding.weight"
_HEAD = "lm_head.weight"


class TrtllmCheckpoint:
    """Weights as ``convert_checkpoint.py`` writes them; they serve the one tp_size that they were converted for.

    A vocabulary embedding sharded over the ranks (use_parallel_embedding) is put together again. A rank's file is
    checked and read when its weights are asked for.

    Args:
        folder: Holds config.json and the rank files.
        dtype: Give the weights in this dtype instead of the config's.

    Raises:
        UserError: Anything missing, damaged, misshapen or not served.
    """

    def __init__(self, folder: Path, *, dtype: str | None = None) -> None:
        self._read_config = read_trtllm_config(folder / "config.json")
        self.config = self._read_config.model.with_dtype(dtype)
        self.source = str(folder)
        self.folder = folder
        self._expected = rank_shapes(self.config, self.tp_size)
        for rank in range(self.tp_size):
            if not self._path(rank).exists():
                raise UserError("does not exist", where=str(self._path(rank)), fix="copy every rank's file")

    @property
    def tp_size(self) -> int:
        """The tensor-parallel size that the checkpoint was converted for."""
        return self._read_config.tp_size

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.safetensors"

    def rank_weights(self, mapping: Mapping, *, only_this_rank: bool = False) -> RankWeights:  # noqa: ARG002
        """One rank's weights as its file has them, read-only; nothing is kept.

        Raises UserError when the checkpoint was converted for another tp_size.
        """
        if mapping.tp_size != self.tp_size:
            raise UserError(
                f"is sharded for tp_size {self.tp_size}, not {mapping.tp_size}",
                where=self.source,
                fix=f"convert it again with convert_checkpoint.py --tp_size {mapping.tp_size}, "
                f"or use tp_size {self.tp_size}",
            )
        files = SafetensorsFiles([self._path(mapping.tp_rank)])
        source = str(self._path(mapping.tp_rank))
        tied = self._read_config.share_embedding_table and _HEAD not in files.shapes
        expected = dict(self._expected)
        if tied:
            del expected[_HEAD]
        expected[_EMBEDDING] = self._embedding_shape()
        check_shapes(expected, files.shapes, source)
        check_all_read(expected, files.shapes, source, ignored=_unneeded)
        files.check_dtypes(list(expected))
        weights: RankWeights = {}
        for name in expected:
            dtype = np.dtype(np.float32) if name.endswith("mlp.router.weight") else numpy_dtype(self.config.dtype)
            weights[name] = convert(self._tensor(files, name), dtype, name=name, source=source)
        if tied:
            rows = self._expected[_HEAD][0]
            weights[_HEAD] = take_rows(weights[_EMBEDDING], mapping.tp_rank * rows, rows)
        for tensor in weights.values():
            tensor.flags.writeable = False
        return weights

    def _embedding_shape(self) -> Shape:
        """Shape of the embedding in a rank's file; TensorRT-LLM pads the vocabulary to a multiple of tp_size."""
        vocab, hidden = self._expected[_EMBEDDING]
        dim = self._read_config.embedding_sharding_dim
        if dim is None:
            return (vocab, hidden)
        if dim == 0:
            return (self._expected[_HEAD][0], hidden)
        if dim != 1 or hidden % self.tp_size:
            raise UserError(
                f"embedding_sharding_dim {dim} is not served for hidden_size {hidden}",
                where=self.source,
                fix="convert the checkpoint without use_parallel_embedding",
            )
        return (vocab, hidden // self.tp_size)

    def _tensor(self, files: SafetensorsFiles, name: str) -> Array:
        dim = self._read_config.embedding_sharding_dim
        if name != _EMBEDDING or dim is None:
            return files.read(name)
        shards = []
        for rank in range(self.tp_size):
            other = SafetensorsFiles([self._path(rank)])
            check_shapes({name: self._embedding_shape()}, other.shapes, str(self._path(rank)))
            other.check_dtypes([name])
            shards.append(other.read(name))
        whole: Array = np.concatenate(shards, axis=dim)
        return whole[: self.config.vocab_size]

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of tokenizer.json, where somebody put one into the folder."""
        return load_folder_tokenizer(self.folder, self.config.vocab_size)


def _unneeded(name: str) -> bool:
    """Tensors outside of the model, such as the tables of rotary embedding, which the config gives."""
    return not name.startswith(("transformer.", "lm_head"))
