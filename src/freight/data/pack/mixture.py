"""Which source each sample of a weighted mixture comes from, as a function of the sample's number alone.

Sample k (from 1) comes from the source with the largest `weight * k - taken`, the lowest index on a tie. No source is
ever ahead of its share by a whole sample, so the sequence repeats exactly after as many samples as the weights have
units; one period in memory (64 Ki entries at most) answers for any k. Nothing is drawn, so there is no state to save.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from freight.errors import DataError

LARGEST_PERIOD = 1 << 16


class Mixture:
    """Endless samples of several sources in fixed shares.

    Args:
        weights: Of each source, > 0, in any unit. Taken as the decimal numbers they are written as; if their common
            unit is smaller than 1/65,536 of all, shares are rounded to that.

    Raises:
        DataError: A share too small to be kept.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.units = integer_shares(weights)
        self.period = int(self.units.sum())
        self._sources = one_period(self.units)
        self._earlier = np.zeros(self.period, dtype=np.int64)  # samples of the same source before, in the period
        for source in range(len(self.units)):
            places = np.flatnonzero(self._sources == source)
            self._earlier[places] = np.arange(len(places))

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of each source; they add up to 1."""
        return self.units / self.period

    def at(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source of each sample, and how many samples of that source are before it.

        Args:
            samples: Numbers of samples, from 0.
        """
        periods, places = np.divmod(samples, self.period)
        sources = self._sources[places]
        return sources, periods * self.units[sources] + self._earlier[places]

    def taken(self, samples: int) -> NDArray[np.int64]:
        """Samples of each source among the first ones."""
        periods, rest = divmod(samples, self.period)
        return periods * self.units + np.bincount(self._sources[:rest], minlength=len(self.units))


def integer_shares(weights: Sequence[float]) -> NDArray[np.int64]:
    """The smallest integers in the ratio of the weights, or nearly so if they would be too large.

    Raises:
        DataError: A weight that would become 0.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    units = [int(weight * common) for weight in exact]
    units = [unit // math.gcd(*units) for unit in units]
    total = sum(units)
    if total <= LARGEST_PERIOD:
        return np.array(units, dtype=np.int64)
    rounded = [round(unit * LARGEST_PERIOD / total) for unit in units]
    if 0 in rounded:
        place = rounded.index(0)
        raise DataError(
            f"weight {weights[place]:g} is less than 1/{2 * LARGEST_PERIOD:,} of all weights; raise it or leave the "
            "source out"
        )
    return np.array(rounded, dtype=np.int64)


def one_period(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sources of the samples of one period, `[sum of units]`."""
    total = int(units.sum())
    ahead = np.zeros(len(units), dtype=np.int64)  # (weight * k - taken), times the sum of units
    sources = np.empty(total, dtype=np.int64)
    for place in range(total):
        ahead += units
        sources[place] = source = int(ahead.argmax())
        ahead[source] -= total
    return sources
