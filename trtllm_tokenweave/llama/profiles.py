"""Optimisation profiles of a decoder: the range of every dynamic input, from the names of its dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trtllm_tokenweave.builder import ShapeRange
from trtllm_tokenweave.errors import UserError
from trtllm_tokenweave.trt import dims_or_none

if TYPE_CHECKING:
    from trtllm_tokenweave.llama.options import NetworkOptions


def decoder_profile(network: Any, options: NetworkOptions, opt_num_tokens: int) -> dict[str, ShapeRange]:
    """Ranges of the inputs that :func:`add_inputs` has added, for steps of one token up to the options' maxima.

    Optima are in the middle, as TensorRT-LLM's are, but for the tokens.

    Args:
        network: The network, real or recorded.
        options: What it was built with.
        opt_num_tokens: Tokens that TensorRT picks kernels for; see `builder.opt_num_tokens`.

    Raises:
        UserError: an input has a dynamic dimension of a name that is unknown here, or ``opt_num_tokens`` is out of
            range.
    """
    if not 1 <= opt_num_tokens <= options.max_num_tokens:
        what = f"{opt_num_tokens} is outside of 1..{options.max_num_tokens}"
        raise UserError(what, where="opt_num_tokens", fix="give a count that steps can have")
    tokens = (1, opt_num_tokens, options.max_num_tokens)
    sequences = _up_to(options.max_batch_size)
    ranges = {
        "num_tokens": tokens,
        "position_ids_num_tokens_range": tokens,
        "batch_size_last_token_ids": sequences,
        "batch_size_beam_width": _up_to(options.max_batch_size * options.max_beam_width),
        "batch_size_cache": sequences,
        "beam_width": _up_to(options.max_beam_width),
        "max_blocks_per_seq": _up_to(-(-options.max_seq_len // options.tokens_per_block)),
        "max_seq_len": _up_to(options.max_seq_len),
        "num_kv_cache_pools": (1, 1, 1),
        "num_pools_layers": (1, 1, 1),
    }
    found = {}
    for tensor in (network.get_input(i) for i in range(network.num_inputs)):
        shape = dims_or_none(tensor.shape) or ()
        if -1 in shape:
            dims = [
                (size,) * 3 if size >= 0 else _range(ranges, tensor.name, tensor.get_dimension_name(axis))
                for axis, size in enumerate(shape)
            ]
            low, optimum, high = (tuple(dim[i] for dim in dims) for i in range(3))
            found[str(tensor.name)] = ShapeRange(low, optimum, high)
    return found


def _up_to(most: int) -> tuple[int, int, int]:
    return 1, (most + 1) // 2, most


def _range(ranges: dict[str, tuple[int, int, int]], tensor: str, dimension: str | None) -> tuple[int, int, int]:
    if dimension not in ranges:
        what = f"the range of its dimension {dimension!r} is not known"
        raise UserError(what, where=f"input {tensor}", fix=f"known are {', '.join(ranges)}")
    return ranges[dimension]
