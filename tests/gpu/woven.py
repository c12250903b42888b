"""Builds stacks in TensorRT, stock and woven, and runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from support.stack import Stack

import trtllm_tokenweave.recorder as recorder
from trtllm_tokenweave.builder import BuilderSettings, Plan, ShapeRange, build_on_all_ranks, opt_num_tokens
from trtllm_tokenweave.comm import CommBackend, SingleComm
from trtllm_tokenweave.device import DeviceArray, Stream
from trtllm_tokenweave.engine import Engine, save_engine
from trtllm_tokenweave.engine_context import Binding, EngineContext
from trtllm_tokenweave.mapping import Mapping
from trtllm_tokenweave.passes import WeaveOptions, WeavePlan, WeaveResult, weave
from trtllm_tokenweave.plugin_library import plugin_library, register_reference
from trtllm_tokenweave.step_graphs import StepGraphs
from trtllm_tokenweave.table import Bucket, LaunchConfig, TableKey, TableRow, TuningTable

Variant = Literal["stock", "fuse", "weave"]
Array = NDArray[Any]
MAX_TOKENS = 4096


def load_plugins() -> None:
    """Register our plugins and those that stand for TensorRT-LLM's."""
    plugin_library()
    register_reference("AllReduce")


@dataclass(frozen=True)
class Shape:
    """A stack of ``layers`` x 2 sites; bfloat16.

    Its collectives use ``ctas`` CTAs of ``threads`` threads: few make them slow. ``split_offset`` tokens move from the
    suffix half to the prefix half.
    """

    hidden: int = 2048
    ffn: int = 4096
    layers: int = 2
    min_tokens: int = 1024
    ctas: int = 4
    threads: int = 1024
    split_offset: int = 0
    gemm_sms: int = 0
    gemm: Literal["trt", "budget"] = "trt"

    def table(self, tp_size: int) -> TuningTable:
        """Splits steps of ``min_tokens`` and more."""
        key = TableKey(gpu="any", tp_size=tp_size, hidden_size=self.hidden, dtype="bfloat16", model_kind="dense")
        launch = LaunchConfig(ctas=self.ctas, threads=self.threads, gemm_sms=self.gemm_sms)
        offset = self.split_offset
        row = TableRow(tokens=Bucket(lo=1), mode="weave", split_offset=offset, attention=launch, mlp=launch)
        return TuningTable(key=key, granularity=256, min_tokens=self.min_tokens, rows=(row,))

    def options(self, mapping: Mapping) -> WeaveOptions:
        """Options of the pass."""
        return WeaveOptions(mapping, self.table(mapping.tp_size), 8, MAX_TOKENS, gemm=self.gemm)

    def stack(self, mapping: Mapping, network: Any) -> Stack:
        """The network's builder; weights keep activations near 1."""
        fields = {"layers": self.layers, "hidden": self.hidden, "ffn": self.ffn, "dtype": recorder.bfloat16}
        scale = 1 / np.sqrt(2 * self.hidden)
        return Stack(mapping.tp_size, mapping.tp_rank, scale=scale, network=network, **fields)  # type: ignore[arg-type]


@dataclass
class Built:
    """One engine and what it takes to run it."""

    shape: Shape
    variant: Variant
    folder: Path
    comm: CommBackend = field(default_factory=SingleComm)
    #: Applied to the network after the weave.
    damage: Callable[[Any], None] | None = None
    fused_memory_bytes: int | None = None

    @property
    def mapping(self) -> Mapping:
        """This process's rank."""
        return Mapping(self.comm.size, self.comm.rank, self.comm.size)

    def make(self, network: Any) -> WeaveResult:
        """Fill a network."""
        self._kept = self.shape.stack(self.mapping, network)
        self._kept.build()
        options = self.shape.options(self.mapping)
        if self.variant == "stock":
            return WeaveResult(WeavePlan(options, (), (), None))
        result = weave(network, replace(options, split=self.variant == "weave"))
        assert result.mode == self.variant
        if self.damage is not None:
            self.damage(network)
        return result

    @cached_property
    def plan(self) -> Plan:
        """The built engine."""
        load_plugins()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        hidden, best = self.shape.hidden, opt_num_tokens(self.shape.table(self.comm.size), MAX_TOKENS, 8)
        ranges = ShapeRange((1, hidden), (best, hidden), (MAX_TOKENS, hidden))
        return build_on_all_ranks(
            self.comm,
            self.make,
            BuilderSettings(
                ({"x": ranges},),
                timing_cache=self.folder.parent / f"timing{self.comm.rank}.cache",
                fused_memory_bytes=self.fused_memory_bytes,
            ),
        )

    @cached_property
    def engine(self) -> Engine:
        """The engine as it comes back from its files."""
        save_engine(self.plan, self.folder, self.comm)
        return Engine.load(self.folder, self.comm)

    @cached_property
    def context(self) -> EngineContext:
        """Its execution context."""
        return self.engine.context()

    def runner(self) -> Runner:
        """Runs steps."""
        return Runner(self.context)


@dataclass
class Runner:
    """Runs steps of a context on arrays of the largest step."""

    context: EngineContext
    stream: Stream = field(default_factory=Stream)

    def __post_init__(self) -> None:
        hidden = self.context.engine.manifest.tensors[0].shape[1]
        self.x = DeviceArray((MAX_TOKENS, hidden), ml_dtypes.bfloat16)
        self.out = DeviceArray((MAX_TOKENS, hidden), ml_dtypes.bfloat16)
        self.graphs = StepGraphs(self.context)

    def bindings(self, tokens: int) -> tuple[dict[str, Binding], dict[str, Binding]]:
        """The first rows of the arrays."""
        shape = (tokens, self.x.shape[1])
        return {"x": Binding(self.x.address, shape, self.x.dtype)}, {"out": Binding(self.out.address, shape)}

    def run(self, x: Array, *, graph: bool = False) -> Array:
        """One step; the output is poisoned before it."""
        padded = np.full(self.x.shape, np.nan, self.x.dtype)
        padded[: len(x)] = x
        self.x.copy_from(padded)
        self.out.fill(0xFF)
        step = self.graphs.step if graph else self.context.step
        step(*self.bindings(len(x)), self.stream)
        self.stream.synchronize()
        return self.out.to_numpy()[: len(x)]


def tokens(count: int, hidden: int, seed: int = 0) -> Array:
    """Random rows."""
    return np.random.default_rng([seed, count]).standard_normal((count, hidden)).astype(ml_dtypes.bfloat16)


def relative_error(got: Array, want: Array) -> float:
    """Frobenius norm of the difference over that of ``want``; NaN is infinitely wrong."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    error = np.linalg.norm(a - b) / np.linalg.norm(b)
    return float("inf") if np.isnan(error) else float(error)
