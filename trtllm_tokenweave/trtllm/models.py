"""Stock model classes, for ``--model_cls_name``."""

from __future__ import annotations

from typing import Any

from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.trtllm import surface


class AutoModel:
    """Stands for the stock class of whatever architecture the checkpoint has; making one gives that class's model."""

    def __new__(cls, config: Any) -> Any:
        """A model without weights."""
        return stock_class(config.architecture)(config)

    @classmethod
    def from_checkpoint(cls, ckpt_dir: str, *args: Any, config: Any, **kwargs: Any) -> Any:
        """A model with the weights of a checkpoint."""
        return stock_class(config.architecture).from_checkpoint(ckpt_dir, *args, config=config, **kwargs)


def stock_class(name: str) -> Any:
    """TensorRT-LLM's class of an architecture.

    Args:
        name: The architecture ("LlamaForCausalLM"), or the name of the class ("LLaMAForCausalLM").

    Raises:
        UserError: TensorRT-LLM has none.
    """
    known = surface.load().models.MODEL_MAP
    found = known.get(name) or next((c for c in known.values() if c.__name__ == name), None)
    if found is None:
        fix = f"give AutoModel, or one of {', '.join(sorted(known))}"
        raise UserError(f"TensorRT-LLM has no model {name!r}", where="--model_cls_name", fix=fix)
    return found
