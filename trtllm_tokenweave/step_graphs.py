"""CUDA graphs of steps that recur: captured once, replayed with one launch."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from trtllm_tokenweave.device import CudaError, Stream, call, cudart
from trtllm_tokenweave.engine_context import Binding, Bindings, EngineContext
from trtllm_tokenweave.errors import TokenWeaveError

#: How many steps without a graph are remembered, for each that may have one.
_SEEN_PER_GRAPH = 16


@dataclass
class StepCounters:
    """How steps were run.

    Attributes:
        eager: Queued layer by layer.
        graph: Replayed from a graph.
        captured: Graphs made.
        fallback: Captures that failed; such steps stay eager.
        evicted: Graphs dropped for newer ones.
        reason: Why the newest capture failed.
    """

    eager: int = 0
    graph: int = 0
    captured: int = 0
    fallback: int = 0
    evicted: int = 0
    reason: str = ""


class _Graph:
    """A graph with its context, which keeps what is bound; given back by :meth:`drop` or with the object."""

    def __init__(self, executable: Any, context: EngineContext) -> None:
        self.executable = executable
        self._finalizer = weakref.finalize(self, _destroy, executable, context)
        # While the process ends, the driver frees everything itself.
        self._finalizer.atexit = False

    def drop(self) -> None:
        """Give everything back when its work is done.

        Raises:
            CudaError: of a call that failed; the others were made all the same.
        """
        self._finalizer()


def _destroy(executable: Any, context: EngineContext) -> None:
    with ExitStack() as last_first:
        last_first.callback(context.close)
        last_first.callback(call, "cudaGraphExecDestroy", executable)
        last_first.callback(context.wait)


class StepGraphs:
    """Runs the steps of a context, from graphs where it can.

    A graph serves steps of equal shapes, addresses and host values: plugins read the latter when the graph is
    captured. A step is captured when it comes for the second time, so that steps that never recur cost nothing.
    A graph keeps the tensors of its step (`Binding.owner`). Given back by :meth:`close`, at the end of a ``with``, or
    with the object.

    Args:
        context: Runs eager steps; graphs get siblings of it.
        capacity: Most graphs; the least recently used one goes first.
    """

    def __init__(self, context: EngineContext, capacity: int = 16) -> None:
        self.context = context
        self.capacity = capacity
        self.counters = StepCounters()
        self._graphs: OrderedDict[bytes, _Graph] = OrderedDict()
        #: Steps that came once (False), and steps whose capture failed (True).
        self._seen: OrderedDict[bytes, bool] = OrderedDict()

    def has(self, inputs: Bindings, outputs: Bindings) -> bool:
        """Whether there is a graph for such a step."""
        return step_key(inputs, outputs) in self._graphs

    def step(self, inputs: Bindings, outputs: Bindings, stream: Stream, context: EngineContext | None = None) -> None:
        """Queue one step; see `EngineContext.step`. All steps go to one stream.

        Args:
            inputs: Every input of the engine, by name.
            outputs: Every output.
            stream: Where to queue it.
            context: Runs it in the place of ``self.context``: one of another optimisation profile. Equal steps are
                given the same.

        Raises:
            UserError, TokenWeaveError: as `EngineContext.step`. A capture that fails is no error: the step runs
                eagerly, and is counted.
        """
        context = self.context if context is None else context
        context.check_open()
        key = step_key(inputs, outputs)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            call("cudaGraphLaunch", graph.executable, stream.handle)
            self.counters.graph += 1
            return
        failed = self._seen.pop(key, None)
        if failed is None or failed or not self.capacity:
            context.step(inputs, outputs, stream)
        elif self._run_and_capture(key, context, inputs, outputs, stream):
            self.counters.eager += 1
            return
        else:
            failed = True
        self.counters.eager += 1
        self._seen[key] = bool(failed)
        while len(self._seen) > _SEEN_PER_GRAPH * max(self.capacity, 1):
            self._seen.popitem(last=False)

    def _run_and_capture(
        self, key: bytes, eager: EngineContext, inputs: Bindings, outputs: Bindings, stream: Stream
    ) -> bool:
        """Run a step, and capture it for the next time; returns whether there is a graph now."""
        try:
            context = eager.sibling()
        except TokenWeaveError as error:
            self._note(error)
            eager.step(inputs, outputs, stream)
            return False
        own = {name: b if b.host is None else Binding.on_host(b.host.copy()) for name, b in inputs.items()}
        try:
            # TensorRT defers work after a change of shapes; it must be done before a capture.
            context.step(own, outputs, stream)
        except TokenWeaveError:
            context.close()
            raise
        try:
            executable = capture(context, stream)
        except TokenWeaveError as error:
            self._note(error)
            context.close()
            return False
        self._graphs[key] = _Graph(executable, context)
        self.counters.captured += 1
        while len(self._graphs) > self.capacity:
            self.counters.evicted += 1
            self._graphs.popitem(last=False)[1].drop()
        return True

    def _note(self, error: TokenWeaveError) -> None:
        self.counters.fallback += 1
        self.counters.reason = str(error)

    def close(self, stream: Stream | None = None) -> None:
        """Drop all graphs; before the context is closed.

        Args:
            stream: Is waited for as well.

        Raises:
            CudaError: of a call that failed; all graphs are dropped all the same.
        """
        with ExitStack() as last_first:
            while self._graphs:
                last_first.callback(self._graphs.popitem()[1].drop)
            if stream is not None:
                last_first.callback(stream.synchronize)

    def __enter__(self) -> StepGraphs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def capture(context: EngineContext, stream: Stream) -> Any:
    """Capture a step of what is bound in ``context`` into an executable graph.

    The mode is thread-local: what other threads do in the meantime does not break the capture.

    Raises:
        TokenWeaveError: when the step cannot be captured; the stream is usable again.
    """
    runtime = cudart()
    call("cudaStreamBeginCapture", stream.handle, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
    try:
        context.enqueue(stream)
    except TokenWeaveError:
        _abandon(stream)
        raise
    try:
        graph = call("cudaStreamEndCapture", stream.handle)
    except CudaError:
        runtime.cudaGetLastError()
        raise
    try:
        return call("cudaGraphInstantiate", graph, 0)
    except CudaError:
        runtime.cudaGetLastError()
        raise
    finally:
        call("cudaGraphDestroy", graph)


def _abandon(stream: Stream) -> None:
    """End a capture that has failed, and clear the error that this leaves."""
    runtime = cudart()
    code, graph = runtime.cudaStreamEndCapture(stream.handle)
    if int(code) == 0 and graph is not None:
        runtime.cudaGraphDestroy(graph)
    runtime.cudaGetLastError()


def step_key(inputs: Bindings, outputs: Bindings) -> bytes:
    """What steps of one graph have in common: names, shapes, and device addresses or host values, or their names."""
    digest = hashlib.sha256()
    for bindings in (inputs, outputs):
        for name in sorted(bindings):
            binding = bindings[name]
            digest.update(repr((name, binding.shape, binding.host is None)).encode())
            if binding.host is None:
                digest.update(binding.address.to_bytes(8, "little"))
            else:
                digest.update(binding.stands_for or np.ascontiguousarray(binding.host).tobytes())
    return digest.digest()
