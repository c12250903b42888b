"""A run out of order: random order of the main stream, late side stream, memory that is reused and poisoned.

A tensor's last read is when the *main* stream launches its last reader, because that is all TensorRT knows. Work
that was queued for the side stream at its launch reads and writes its buffers later, whatever they hold by then.
Edges that the network lacks therefore show as wrong results.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from trtllm_tokenweave.interpreter.ledger import Event, Ledger
from trtllm_tokenweave.interpreter.memory import Buffer, Memory
from trtllm_tokenweave.interpreter.program import JoinKey, Program, Step, guard
from trtllm_tokenweave.interpreter.schedule import Schedule
from trtllm_tokenweave.recorder.enums import dtype_of, numpy_dtype
from trtllm_tokenweave.recorder.tensor import TensorDesc

Array = NDArray[Any]


@dataclass
class _Queued:
    """Work on the side stream: where it will read and write once it runs."""

    step: Step
    inputs: list[Array]
    outputs: list[Array]
    launched: int


def simulate(
    program: Program, values: list[Array | None], schedule: Schedule, source: random.Random, ledger: Ledger
) -> dict[str, Array]:
    """Run one step; ``values`` holds constants and network inputs.

    Returns:
        The network outputs as they are when the main stream is done. Side work that nothing waited for runs after
        that, so that other ranks are not left alone, and is marked as not joined in the ledger.
    """
    return _Simulation(program, values, schedule, source, ledger).run()


class _Simulation:
    def __init__(
        self, program: Program, values: list[Array | None], schedule: Schedule, source: random.Random, ledger: Ledger
    ) -> None:
        self.program = program
        self.values = values
        self.adversarial = schedule.adversarial
        self.source = source
        self.eagerness = schedule.eagerness(source)
        self.ledger = ledger
        self.memory = Memory()
        self.buffers: dict[int, Buffer] = {}
        self.queue: deque[_Queued] = deque()
        self.outputs = {number for _, number in program.outputs}
        self.reads = [0] * len(values)
        for step in program.steps:
            for number in step.inputs:
                self.reads[number] += 1

    def run(self) -> dict[str, Array]:
        for launched, step in enumerate(self.order()):
            self.launch(step, launched)
            while self.queue and self.source.random() < self.eagerness:
                self.run_oldest()
        results = {tensor.name: self.value(number).copy() for tensor, number in self.program.outputs}
        while self.queue:
            self.run_oldest(joined=False)
        self.ledger.peak_bytes = self.memory.peak_bytes
        return results

    def order(self) -> list[Step]:
        """Layers of the main stream in a random topological order (recorded order if not adversarial)."""
        steps = self.program.steps
        if not self.adversarial:
            return steps
        producer = {number: i for i, step in enumerate(steps) for number in step.outputs}
        needs = [{producer[n] for n in step.inputs if n in producer} for step in steps]
        readers: list[list[int]] = [[] for _ in steps]
        for i, found in enumerate(needs):
            for other in found:
                readers[other].append(i)
        waiting = [len(found) for found in needs]
        # Fixed random priorities hold a layer back for long, which a fresh choice at every step hardly ever does.
        rank = [self.source.random() for _ in steps]
        for _ in range(self.source.randrange(3)):
            rank[self.source.randrange(len(steps))] += self.source.choice((1, 2, -1))
        ready = [(rank[i], i) for i, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            _, i = heapq.heappop(ready)
            order.append(steps[i])
            for reader in readers[i]:
                waiting[reader] -= 1
                if not waiting[reader]:
                    heapq.heappush(ready, (rank[reader], reader))
        return order

    def value(self, number: int) -> Array:
        array = self.values[number]
        assert array is not None
        return array

    def launch(self, step: Step, launched: int) -> None:
        """What the main stream does at a layer: run it or queue it, then free what has no reader left."""
        inputs = [self.value(n) for n in step.inputs]
        if step.waits_for is not None:
            self.wait_for(step.waits_for)
        if step.queued is not None and self.adversarial:
            outputs = self.queue_work(step, inputs, launched)
        else:
            outputs = self.run_now(step, inputs, launched)
        for position, number in enumerate(step.outputs):
            source = step.aliases.get(position)
            self.adopt(number, outputs[position], None if source is None else step.inputs[source])
        for number in step.inputs:
            buffer = self.buffers.get(number)
            if buffer is not None:
                buffer.pending -= 1
        for number in {*step.inputs, *step.outputs}:
            buffer = self.buffers.get(number)
            if buffer is not None and not buffer.pending and not buffer.permanent:
                self.memory.release(buffer)
                # Aliases share the buffer: they must not free it again.
                for other in [n for n, held in self.buffers.items() if held is buffer]:
                    del self.buffers[other]

    def adopt(self, number: int, output: tuple[Array, Buffer], aliased: int | None) -> None:
        """Bind an output to its memory."""
        array, buffer = output
        if aliased is not None:
            shared = self.buffers.get(aliased)
            self.values[number] = self.value(aliased)
            if shared is None:  # a network input or constant: lives for ever
                return
            buffer = shared
        else:
            self.values[number] = array
        self.buffers[number] = buffer
        buffer.pending += self.reads[number]
        buffer.permanent |= number in self.outputs

    def run_now(self, step: Step, inputs: list[Array], launched: int) -> list[tuple[Array, Buffer]]:
        with guard(step.layer):
            results = step.op(*inputs)
        arrays = results if isinstance(results, list) else [results]
        self.ledger.events.append(
            Event(step.name, "side" if step.queued else "main", launched, len(self.ledger.events))
        )
        outputs = []
        for position, array in enumerate(arrays):
            if position in step.aliases:
                outputs.append((array, _NO_BUFFER))
                continue
            memory, buffer = self.memory.allocate(array.shape, array.dtype)
            memory[...] = array
            outputs.append((memory, buffer))
        return outputs

    def queue_work(self, step: Step, inputs: list[Array], launched: int) -> list[tuple[Array, Buffer]]:
        assert step.plugin is not None
        descs = [TensorDesc(dtype_of(x), x.shape) for x in inputs]
        with guard(step.layer):
            shapes = step.plugin.spec.outputs(step.plugin.fields, descs)
        outputs = [self.memory.allocate(d.shape, numpy_dtype(d.dtype)) for d in shapes]
        self.queue.append(_Queued(step, inputs, [array for array, _ in outputs], launched))
        return outputs

    def wait_for(self, key: JoinKey) -> None:
        """Run everything queued up to the newest work of a (site, half); nothing if it has run or was never queued."""
        positions = [i for i, work in enumerate(self.queue) if work.step.queued == key]
        for _ in range(positions[-1] + 1 if positions else 0):
            self.run_oldest()

    def run_oldest(self, joined: bool = True) -> None:
        work = self.queue.popleft()
        with guard(work.step.layer):
            results = work.step.op(*work.inputs)
            # The chain, the last output, orders the main stream and is never written: it may be gone by now.
            for memory, array in zip(work.outputs[:-1], results[:-1], strict=True):
                memory[...] = array
        self.ledger.events.append(Event(work.step.name, "side", work.launched, len(self.ledger.events), joined=joined))


_NO_BUFFER = Buffer(storage=None, dtype=None)  # type: ignore[arg-type]
