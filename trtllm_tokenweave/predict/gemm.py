"""Time of a GEMM: its measured curve, or the curve of the shape most like it, carried over by a wave model."""

from __future__ import annotations

import math
from functools import cached_property

from trtllm_tokenweave.predict.curve import Curve, Fit, fit_positive
from trtllm_tokenweave.predict.data import GemmData
from trtllm_tokenweave.waves import GemmShape, Tile, wave_count

# Fits the measured curves best of 64 x 128, 128 x 128 and 128 x 256: the library takes small tiles where large ones
# would leave a wave half empty, so that of a curve's steps only these remain.
WAVE_TILE = Tile(128, 128)
BYTES = 2  # of an element; curves are measured in 16 bits


def gemm_flops(shape: GemmShape, num_tokens: int) -> float:
    """Two for each product: ``2 M n k`` over all groups."""
    return 2.0 * shape.groups * shape.rows(num_tokens) * shape.n * shape.k


class GemmModel:
    """GEMM times of one GPU, in microseconds, with the GPU to themselves."""

    def __init__(self, data: GemmData) -> None:
        self.data = data
        self._measured = {(c.n, c.k): Curve.through(c.points, data.event_us) for c in data.curves}
        self._curves: dict[GemmShape, Curve] = {}

    def us(self, shape: GemmShape, num_tokens: int) -> float:
        """Time of a GEMM over `num_tokens` tokens; 0 for none."""
        if num_tokens == 0:
            return 0.0
        if shape.groups > 1:
            return self.modelled(shape, num_tokens)
        return self._curve(shape)(num_tokens)

    def measured_tokens(self, shape: GemmShape) -> tuple[int, int]:
        """The fewest and the most tokens of the curve that a shape without groups takes its times from."""
        xs = self._curve(shape).xs
        return int(xs[0]), int(xs[-1])

    def is_measured(self, shape: GemmShape) -> bool:
        """Whether the shape has a curve of its own."""
        return shape.groups == 1 and (shape.n, shape.k) in self._measured

    def _curve(self, shape: GemmShape) -> Curve:
        if shape not in self._curves:
            self._curves[shape] = self._make_curve(shape)
        return self._curves[shape]

    def _make_curve(self, shape: GemmShape) -> Curve:
        if self.is_measured(shape):
            return self._measured[shape.n, shape.k]
        nearest = min(self._measured, key=lambda nk: abs(math.log(nk[0] / shape.n)) + abs(math.log(nk[1] / shape.k)))
        base, other = self._measured[nearest], GemmShape("", shape.block, *nearest)
        # The model's error at a size is much alike for shapes alike, so it is taken from the neighbour.
        points = [
            (x, y * self.modelled(shape, int(x)) / self.modelled(other, int(x)))
            for x, y in zip(base.xs, base.ys, strict=True)
        ]
        return Curve.through(points)

    @cached_property
    def fit(self) -> Fit:
        """The wave model: microseconds of a launch, of a wave and unit of depth k, of a FLOP, of a byte."""
        rows, times = [], []
        for (n, k), curve in self._measured.items():
            shape = GemmShape("", "mlp", n, k)
            for tokens, us in zip(curve.xs, curve.ys, strict=True):
                rows.append(self._features(shape, int(tokens)))
                times.append(us)
        return fit_positive(rows, times)

    def modelled(self, shape: GemmShape, num_tokens: int) -> float:
        """``launch + waves * k * per_wave + flops * per_flop + bytes * per_byte``, whether measured or not."""
        features = self._features(shape, num_tokens)
        return sum(c * f for c, f in zip(self.fit.coefficients, features, strict=True))

    def _features(self, shape: GemmShape, num_tokens: int) -> tuple[float, float, float, float]:
        rows = shape.groups * shape.rows(num_tokens)
        waves = wave_count(shape.tiles(num_tokens, WAVE_TILE), self.data.sms)
        moved = BYTES * (shape.groups * shape.n * shape.k + rows * (shape.n + shape.k))
        return 1.0, float(waves * shape.k), gemm_flops(shape, num_tokens), float(moved)
