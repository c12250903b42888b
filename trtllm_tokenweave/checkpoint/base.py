"""What every checkpoint offers, and the part that all checkpoints of a whole model share."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping as AbstractMapping
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from trtllm_tokenweave.checkpoint.dtypes import Array
from trtllm_tokenweave.checkpoint.sharding import RankWeights, Sharder
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.model_config import ModelConfig

Message = AbstractMapping[str, str]


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end generation."""
        ...

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens written in it are recognised.

        ``add_bos`` prepends the begin-of-text token where the model wants one; leave it off for text made by
        ``apply_chat_template``, whose template writes it.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        ...

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation ({"role", "content"} each), by the model's own template.

        Without a template the contents are joined by newlines.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the files of a Hugging Face tokenizer, which ``tokenizer.load_folder_tokenizer`` reads."""
        ...


class Checkpoint(Protocol):
    """A model's shape, weights and tokenizer."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape, with the dtype that the weights are given in."""
        ...

    @property
    def source(self) -> str:
        """Where it comes from, for messages."""
        ...

    def rank_weights(self, mapping: Mapping, *, only_this_rank: bool = False) -> RankWeights:
        """One rank's weights under TensorRT-LLM's names (``names.rank_shapes``), read-only.

        By default the shards of all ranks are made at once and kept, for processes that run every rank;
        ``only_this_rank`` makes one rank's and keeps nothing. Raises UserError when ``mapping`` cannot be served.
        """
        ...

    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, or None where it has none."""
        ...


class FullCheckpoint(ABC):
    """A checkpoint that holds the whole model and shards it on request."""

    def __init__(self, config: ModelConfig, source: str, *, tied_head: bool = False) -> None:
        self.config = config
        self.source = source
        self.tied_head = tied_head
        self._lock = threading.Lock()
        self._kept: tuple[int, list[RankWeights]] | None = None

    @abstractmethod
    def read_full(self, name: str) -> Array:
        """The whole tensor under its Hugging Face name, in any float dtype and of the shape in ``full_shapes``.

        The head of a checkpoint with ``tied_head`` is never asked for.
        """

    def rank_weights(self, mapping: Mapping, *, only_this_rank: bool = False) -> RankWeights:
        """See ``Checkpoint.rank_weights``."""
        with self._lock:
            if self._kept is not None and self._kept[0] == mapping.tp_size:
                return dict(self._kept[1][mapping.tp_rank])
            # Give the shards for another tp_size back before making these: never two copies of the model.
            self._kept = None
            sharder = Sharder(
                self.config, mapping.tp_size, self.read_full, source=self.source, tied_head=self.tied_head
            )
            ranks = [mapping.tp_rank] if only_this_rank else list(range(mapping.tp_size))
            shards = sharder.shard(ranks)
            for shard in shards:
                for tensor in shard.values():
                    tensor.flags.writeable = False
            if only_this_rank:
                return shards[0]
            self._kept = (mapping.tp_size, shards)
            return dict(shards[mapping.tp_rank])

    def tokenizer(self) -> Tokenizer | None:
        """See ``Checkpoint.tokenizer``."""
        return None


def require_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer. Raises UserError where it has none."""
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        raise UserError(
            "has no tokenizer", where=checkpoint.source, fix="put tokenizer.json into the folder, or give token ids"
        )
    return tokenizer
