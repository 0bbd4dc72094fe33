"""Numbers before they become pictures: scales, round ticks, thinning and smoothing of curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]

CURVE_COLUMNS = 600


@dataclass(frozen=True)
class Scale:
    """Maps values to 0..1, linearly or by logarithm."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Place of a value: 0 at `low`, 1 at `high`."""
        if self.log:
            value = max(value, self.low)
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int) -> list[float]:
        """Round values inside the range, about `count` of them."""
        return log_ticks(self.low, self.high, count) if self.log else linear_ticks(self.low, self.high, count)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in `[low, high]`, about `count` of them."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.75)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Powers of ten in `[low, high]`, with 2 and 5 between them where there is room."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    stride = max(1, (last - first) // max(count, 1))
    values = [f * 10.0**e for e in range(first, last + 1, stride) for f in factors]
    return [v for v in values if low * 0.999 <= v <= high * 1.001]


def range_of(values: Sequence[float], *, log: bool = False, zero: bool = False) -> Scale:
    """A scale with a little air around the finite values; one value gets room on both sides."""
    finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
    low, high = min(finite), max(finite)
    if log:
        return Scale(low / 1.25, high * 1.25, log=True)
    if zero:
        return Scale(0.0, high * 1.08 if high > 0 else 1.0)
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(low - air, high + air)


def downsample(points: Sequence[Point], columns: int = CURVE_COLUMNS) -> list[Point]:
    """At most two points per column, the lowest and the highest, in their order; gaps (nan) are kept."""
    if len(points) <= 2 * columns:
        return list(points)
    kept: list[Point] = []
    for column in range(columns):
        part = points[len(points) * column // columns : len(points) * (column + 1) // columns]
        finite = [p for p in part if math.isfinite(p[1])]
        if len(finite) < len(part):
            kept.append(next(p for p in part if not math.isfinite(p[1])))
        if finite:
            ends = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
            kept.extend(sorted(ends))
    return sorted(kept)


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Centred moving mean over `window` points, cut off at both ends; gaps are left out."""
    finite = [p for p in points if math.isfinite(p[1])]
    sums = [0.0, *itertools.accumulate(y for _, y in finite)]
    half = window // 2
    spans = ((max(0, i - half), min(len(finite), i + half + 1)) for i in range(len(finite)))
    return [
        (x, (sums[stop] - sums[start]) / (stop - start)) for (x, _), (start, stop) in zip(finite, spans, strict=True)
    ]
