"""Two streams of one GPU, simulated: compute that shares its SMs with the collective of the other half."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from trtllm_tokenweave.errors import UserError

# Room for rounding where a tile ends exactly when another begins.
_TINY = 1e-9


@dataclass(frozen=True)
class Op:
    """One kernel of the compute stream.

    Attributes:
        us: Time with the GPU to itself.
        tiles: Thread blocks of a GEMM, one to an SM; 0: many small ones, which share the SMs evenly.
        flops: Of a kernel whose time follows the clock; 0: bound by memory.
        budget: SMs that a GEMM keeps to, so that it loses none to a collective; 0: it takes all.
    """

    us: float
    tiles: int = 0
    flops: float = 0.0
    budget: int = 0

    def slowed(self, slowdown: float) -> Op:
        """The kernel at 1 / slowdown of the full clock."""
        return replace(self, us=self.us * slowdown) if self.flops else self


@dataclass(frozen=True)
class _Held:
    """SMs held by a collective."""

    begin: float
    end: float
    ctas: int


@dataclass
class Streams:
    """The clock of either stream; times in microseconds.

    A collective starts when it is queued and those before it are done, and takes its SMs at once (the compute stream
    waits `fork_us` for that). Compute slows in two ways while it runs: the SMs are missing, which a GEMM feels as tiles
    that no one takes or that wait for their SM, and the others are slower by the share `beside` (they have the same
    memory and power).

    Attributes:
        sms: Of the GPU.
        beside: Share of compute's speed that a running collective costs.
        fork_us: Wait of the compute stream for each collective.
        dealt: GEMMs deal their tiles out to the SMs beforehand (TensorRT's persistent kernels); else an SM that is free
            takes the next tile (cuBLAS's).
        now: Clock of the compute stream.
    """

    sms: int
    beside: float = 0.0
    fork_us: float = 0.0
    dealt: bool = False
    now: float = 0.0
    _free: float = 0.0
    _held: list[_Held] = field(default_factory=list)
    _ends: dict[Hashable, float] = field(default_factory=dict)

    def run(self, op: Op) -> None:
        """A kernel of the compute stream."""
        self._held = [held for held in self._held if held.end > self.now]
        if op.budget:
            self.now = self._when(op.us * math.ceil(op.tiles / op.budget) / math.ceil(op.tiles / self.sms))
        elif not self._held:
            self.now += op.us
        elif op.tiles:
            self.now = self._after_dealt(op) if self.dealt else self._after_tiles(op)
        else:
            self.now = self._after_shared(op.us)

    def start(self, key: Hashable, us: float, ctas: int) -> None:
        """Queue a collective behind those queued before.

        Raises:
            UserError: the collective's CTAs leave compute no SM, or are below 0.
        """
        if not 0 <= ctas < self.sms:
            fix = "give the collective fewer CTAs than the GPU has SMs"
            raise UserError(f"{ctas} is outside of 0..{self.sms - 1}", where="ctas", fix=fix)
        begin = max(self.now, self._free)
        self._free = begin + us
        self._held.append(_Held(begin, self._free, ctas))
        self._ends[key] = self._free
        self.now += self.fork_us

    def join(self, key: Hashable) -> None:
        """Let the compute stream wait for a collective."""
        self.now = max(self.now, self._ends.pop(key))

    def finish(self) -> float:
        """When both streams are idle."""
        return max(self.now, self._free)

    def _progress(self, until: float) -> float:
        """What one SM that computes from now on has done at a time: the time, less what collectives cost of it."""
        slowed = sum(min(held.end, until) - max(held.begin, self.now) for held in self._held if held.begin < until)
        return until - self.now - self.beside * slowed

    def _when(self, progress: float) -> float:
        """The time at which `_progress` has come so far."""
        time = self.now
        for held in self._held:  # one after the other
            before = max(held.begin - time, 0.0)
            if progress <= before:
                return time + progress
            progress, time = progress - before, time + before
            inside = (held.end - time) * (1 - self.beside)
            if progress <= inside:
                return time + progress / (1 - self.beside)
            progress, time = progress - inside, held.end
        return time + progress

    def _after_tiles(self, op: Op) -> float:
        """End of a GEMM whose tiles go to whichever SM is free; the collective's SMs join when it ends."""
        tile_us = op.us / math.ceil(op.tiles / self.sms)
        # (SMs, progress at which they are free): those that no collective holds, then by the last one that does.
        groups: list[tuple[int, float]] = []
        below = 0
        for ctas in sorted({held.ctas for held in self._held}):
            end = max(held.end for held in self._held if held.ctas >= ctas)
            groups.append((ctas - below, self._progress(end)))
            below = ctas
        groups.append((self.sms - below, 0.0))

        def done(progress: float) -> int:
            return sum(sms * max(0, math.floor((progress - free) / tile_us + _TINY)) for sms, free in groups)

        ends = []
        for _, free in groups:
            # The GEMM ends with a tile of some group, the first after which all are done. So many tiles on each SM that
            # no collective ever holds would do in any case.
            low, high = 1, math.ceil(op.tiles / (self.sms - below))
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if done(free + middle * tile_us) >= op.tiles else (middle + 1, high)
            ends.append(free + low * tile_us)
        return self._when(min(ends))

    def _after_dealt(self, op: Op) -> float:
        """End of a GEMM of one CTA an SM, each with its share of the tiles, of which those that find no SM start late.

        They are the last ones, which have the smaller share where the shares differ, and start when the collective or
        the first of the other CTAs has ended.
        """
        held = self._held[0]
        ctas = min(op.tiles, self.sms)
        late = ctas - (self.sms - held.ctas)
        if late <= 0 or held.begin > self.now:
            return self._when(op.us)
        share, more = divmod(op.tiles, ctas)
        tile_us = op.us / math.ceil(op.tiles / self.sms)
        small = ctas - more
        first = min(self._progress(held.end), (share if late < small else share + 1) * tile_us)
        return self._when(max(op.us, first + (share if late <= small else share + 1) * tile_us))

    def _after_shared(self, us: float) -> float:
        """End of a kernel of many small blocks, on the SMs left."""
        time = self.now
        for held in self._held:
            before = max(held.begin - time, 0.0)
            if us <= before:
                return time + us
            us, time = us - before, time + before
            speed = (self.sms - held.ctas) / self.sms * (1 - self.beside)
            inside = (held.end - time) * speed
            if us <= inside:
                return time + us / speed
            us, time = us - inside, held.end
        return time + us
