"""The file for ``trtllm-build --model_cls_file FILE --model_cls_name AutoModel``.

``trtllm-build`` runs it before it builds anything: it sets the hooks, with the options that environment variables give,
and hands out stock classes. ``--model_cls_name`` also takes an architecture or the name of a stock class.
"""

from __future__ import annotations

from typing import Any

from trtllm_tokenweave.trtllm.hooks import install
from trtllm_tokenweave.trtllm.models import AutoModel, stock_class
from trtllm_tokenweave.trtllm.options import environment_options
from trtllm_tokenweave.trtllm.surface import load

__all__ = ["AutoModel"]

# trtllm-build runs this under a name of its own; importing it as part of the package changes nothing.
if not __name__.startswith("trtllm_tokenweave."):
    install(load(), environment_options())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return stock_class(name)
