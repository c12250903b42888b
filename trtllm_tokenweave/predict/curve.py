"""Measured points as a function, and the least-squares fit that every other constant of the model comes from."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Curve:
    """A function through measured points: linear between them, constant below the first.

    Above the last it goes on with the least-squares slope of the points in the upper half of the range, which is the
    cost of one more token once everything is saturated.

    Attributes:
        xs: Rising.
        ys: Of the same length, not falling.
        slope: Beyond the last point.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    slope: float

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]], less: float = 0.0) -> Curve:
        """Through the points less a constant, each lowered to the cheapest of the larger ones.

        A library that chooses its kernel by a rule is slow at some sizes by mistake (cuBLAS on H200: 599 us at 448
        tokens, 377 at 512); TensorRT times its candidates, and could run the larger size instead.
        """
        xs, values = zip(*sorted(points), strict=True)
        ys = tuple(itertools.accumulate((y - less for y in reversed(values)), min))[::-1]
        upper = [(x, y) for x, y in zip(xs, ys, strict=True) if 2 * x >= xs[-1]]
        # One point alone: the line from the origin.
        slope = ys[-1] / xs[-1]
        if len(upper) > 1:
            slope = float(np.polyfit([x for x, _ in upper], [y for _, y in upper], 1)[0])
        return cls(tuple(map(float, xs)), tuple(map(float, ys)), max(slope, 0.0))

    def __call__(self, x: float) -> float:
        """The value at x >= 0."""
        xs, ys = self.xs, self.ys
        if x >= xs[-1]:
            return ys[-1] + self.slope * (x - xs[-1])
        if x <= xs[0]:
            return ys[0]
        i = bisect_right(xs, x)
        return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


@dataclass(frozen=True)
class Fit:
    """Coefficients, none negative, and what is left over: measured against fitted, as shares of the measured."""

    coefficients: tuple[float, ...]
    rms: float
    worst: float


def fit_positive(features: ArrayLike, measured: ArrayLike, known: ArrayLike = 0.0) -> Fit:
    """Least squares of relative errors: min sum(((known + features @ c) / measured - 1)^2) over c >= 0.

    Args:
        features: [points, coefficients], a handful of columns.
        measured: [points], all above 0.
        known: [points], the part of the time that has no coefficient.
    """
    times = np.asarray(measured, np.float64)
    rows: NDArray[np.float64] = np.asarray(features, np.float64) / times[:, None]
    target = 1 - np.broadcast_to(np.asarray(known, np.float64), times.shape) / times
    scale = np.abs(rows).max(axis=0)
    rows = rows / scale
    count = rows.shape[1]
    solution, least = np.zeros(count), float((target**2).sum())
    # The optimum has some coefficients at 0 and the others free; with so few, each choice is tried.
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            columns = list(chosen)
            found = np.linalg.lstsq(rows[:, columns], target, rcond=None)[0]
            loss = float(((rows[:, columns] @ found - target) ** 2).sum())
            if (found >= 0).all() and loss < least:
                solution, least = np.zeros(count), loss
                solution[columns] = found
    errors = rows @ solution - target
    return Fit(
        tuple(float(c) for c in solution / scale), float(np.sqrt((errors**2).mean())), float(np.abs(errors).max())
    )
