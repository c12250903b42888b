from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .._strict import Strict, seal
from ..mapping import Mapping


class PretrainedConfig(Strict):
    def __init__(self, *, architecture: str, dtype: str, hidden_size: int, mapping: Any, **others: Any) -> None:
        self.architecture, self.dtype, self.hidden_size = architecture, dtype, hidden_size
        self.mapping = Mapping(**mapping)
        self._double_document = {"architecture": architecture, "dtype": dtype, "hidden_size": hidden_size}
        self._double_document |= {"mapping": mapping, **others}

    @classmethod
    def _double_read(cls, path: Path) -> PretrainedConfig:
        return cls(**json.loads(path.read_text()))


class PretrainedModel(Strict):
    def __init__(self, config: PretrainedConfig) -> None:
        self._double_config = config
        self._double_folder: str | None = None

    @classmethod
    def from_checkpoint(
        cls, ckpt_dir: str, rank: int | None = None, config: PretrainedConfig | None = None
    ) -> PretrainedModel:
        assert config is not None
        assert rank is None
        model = cls(config)
        model._double_folder = ckpt_dir
        return model


class LLaMAForCausalLM(PretrainedModel):
    pass


class QWenForCausalLM(PretrainedModel):
    pass


class EncoderDecoder(PretrainedModel):
    """An architecture whose network TensorRT-LLM does not optimise, as `DecoderModel` is."""


MODEL_MAP = {
    "LlamaForCausalLM": LLaMAForCausalLM,
    "MixtralForCausalLM": LLaMAForCausalLM,
    "Qwen2ForCausalLM": QWenForCausalLM,
    "DecoderModel": EncoderDecoder,
}

seal(__name__)
