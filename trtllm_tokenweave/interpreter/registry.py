"""Which numpy function stands for which plugin.

A kernel module registers itself with the decorator::

    @kernel("GPTAttention", "1", "tensorrt_llm")
    def gpt_attention(ctx: KernelContext, fields: Fields, inputs: list[Array]) -> list[Array]: ...

``inputs`` are in the layer's order, with their run-time shapes (zero rows included) and the dtypes of the network;
they must not be written to. The result is one array per output, of the shape and dtype that the plugin's
``PluginSpec.outputs`` promises. A kernel may return an input (or a view of one) as an output.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_tokenweave.comm import CommBackend
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.recorder.plugin import Fields, PluginKey

Array = NDArray[Any]

#: Modules whose import registers kernels.
_KERNEL_MODULES = ("collectives", "attention", "moe")


@dataclass
class KernelContext:
    """What a kernel may use besides its fields and inputs.

    Attributes:
        comm: Collectives of this rank.
        exact: Results must not depend on how rows are batched (accumulate in float64, row by row).
        pools: Paged KV-cache pools by the address that ``host_kv_cache_pool_pointers`` carries; kernels write to them.
        step: Scratch that lives for one ``run`` and is shared by all layers of the context (per-step metadata).
        layer: Name of the layer, for messages.
        float32_copy: Float32 copy of an array; for constants of the network it is made once and kept.
    """

    comm: CommBackend
    exact: bool = False
    pools: dict[int, Array] = field(default_factory=dict)
    step: dict[Any, Any] = field(default_factory=dict)
    layer: str = ""
    float32_copy: Callable[[Array], NDArray[np.float32]] = lambda array: array.astype(np.float32, copy=False)


Kernel = Callable[[KernelContext, Fields, list[Array]], list[Array]]

KERNELS: dict[PluginKey, Kernel] = {}


def kernel(name: str, version: str, namespace: str) -> Callable[[Kernel], Kernel]:
    """Register the decorated function as the kernel of a plugin type.

    Raises:
        ValueError: when another function is registered under the same key.
    """

    def register(function: Kernel) -> Kernel:
        key = (name, version, namespace)
        if KERNELS.setdefault(key, function) is not function:
            raise ValueError(f"two kernels for plugin {key}")
        return function

    return register


def find_kernel(key: PluginKey) -> Kernel:
    """Return the kernel of a plugin type.

    Raises:
        UserError: when the interpreter has none.
    """
    load_kernels()
    found = KERNELS.get(key)
    if found is None:
        name, version, namespace = key
        raise UserError(
            f"the interpreter cannot run plugin {name!r} version {version!r} of namespace {namespace!r}",
            fix=f"plugins it can run: {', '.join(sorted({k[0] for k in KERNELS}))}",
        )
    return found


def load_kernels() -> None:
    """Import every module that registers kernels; cheap after the first call."""
    for module in _KERNEL_MODULES:
        name = f"{__package__}.{module}"
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
