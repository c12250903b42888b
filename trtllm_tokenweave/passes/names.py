"""Names of the layers that the pass adds: one scheme, so that traces, refusals and errors can be read."""

from __future__ import annotations

import re

from trtllm_tokenweave.plugin_specs import Half

PREFIX = "tokenweave"
CHAIN_START = f"{PREFIX}/chain"
ONE_SEQUENCE = f"{PREFIX}/one_sequence"
BATCH_SPLIT = f"{PREFIX}/batch_split"


def start(site: int, half: Half) -> str:
    """Layer name of the collective of a site's half."""
    return f"{PREFIX}/site_{site}/all_reduce_rms_norm/{half.name.lower()}"


def join(site: int, half: Half) -> str:
    """Layer name of the join that waits for it."""
    return f"{PREFIX}/site_{site}/stream_join/{half.name.lower()}"


def clone(name: str) -> str:
    """Layer name of the suffix half's copy of a layer."""
    return f"{name}/suffix"


def rows(half: Half) -> str:
    """Layer name of what gives a half its rows at the region's entry."""
    return f"{PREFIX}/rows/{half.name.lower()}"


def attention_rows(site: int, number: int, half: Half) -> str:
    """Layer name of what gives a half its rows of the ``number``-th whole attention before a site."""
    return f"{PREFIX}/site_{site}/attention_rows_{number}/{half.name.lower()}"


def gate(site: int, number: int = 0) -> str:
    """Layer name of an ordering edge that keeps the suffix half's work behind the prefix half's collective."""
    return f"{PREFIX}/site_{site}/gate_{number}"


def gemm(name: str) -> str:
    """Layer name of our plugin in the place of a matrix multiplication."""
    return f"{name}/{PREFIX}_gemm"


def concatenate(name: str) -> str:
    """Layer name of the concatenation of both halves of a tensor."""
    return f"{name}/{PREFIX}_concatenate"


def is_concatenate(name: str) -> bool:
    """Whether a layer name is one of :func:`concatenate`."""
    return name.endswith(f"/{PREFIX}_concatenate")


def is_rows(name: str, half: Half) -> bool:
    """Whether a layer name is one of :func:`rows` or :func:`attention_rows` for ``half``."""
    return name == rows(half) or (is_attention_rows(name) and name.endswith(f"/{half.name.lower()}"))


def is_attention_rows(name: str) -> bool:
    """Whether a layer name is one of :func:`attention_rows`."""
    return re.fullmatch(rf"{PREFIX}/site_\d+/attention_rows_\d+/\w+", name) is not None
