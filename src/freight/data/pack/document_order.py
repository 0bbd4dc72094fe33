"""The documents of an epoch in their order, by place: every document once, or sources mixed by weight.

Both are functions of (seed, epoch, place). A mixture's epoch has as many samples as there are documents in all; a small
source with a large weight is passed over several times in it, a large one is cut, and the next epoch goes on there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from freight.data.documents import Documents
from freight.data.order import Permutation
from freight.data.pack.mixture import Mixture


class DocumentOrder(Protocol):
    """Which document stands where."""

    def at(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Documents at some places of an epoch."""
        ...


class EveryDocument:
    """Every document once in an epoch.

    Args:
        count: Number of documents.
        key: What chooses the order beside the epoch; None = their own order.
    """

    def __init__(self, count: int, key: tuple[int, str] | None) -> None:
        self._count = count
        self._key = key

    def at(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `DocumentOrder.at`."""
        if self._key is None:
            return places
        seed, fingerprint = self._key
        return Permutation(self._count, (seed, epoch, fingerprint)).at(places)


class MixedSources:
    """Samples of several sources by weight; every source is passed over again and again, each time in another order.

    Args:
        counts: Documents of each source; the documents of a source stand together.
        mixture: Shares of the sources.
        key: What chooses the orders; None = each source in its own order.
    """

    def __init__(self, counts: Sequence[int], mixture: Mixture, key: tuple[int, str] | None) -> None:
        self._counts = np.array(counts, dtype=np.int64)
        self._starts = np.cumsum([0, *counts])[:-1]
        self._mixture = mixture
        self._key = key

    def at(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `DocumentOrder.at`."""
        sources, numbers = self._mixture.at(epoch * int(self._counts.sum()) + places)
        rounds, within = np.divmod(numbers, self._counts[sources])
        if self._key is not None:
            seed, fingerprint = self._key
            for source in np.unique(sources):
                mine = np.flatnonzero(sources == source)
                # Numbers of a source grow with the place, so a round is a run.
                for run in np.split(mine, np.flatnonzero(np.diff(rounds[mine])) + 1):
                    parts = (seed, int(rounds[run[0]]), fingerprint, int(source))
                    within[run] = Permutation(int(self._counts[source]), parts).at(within[run])
        return self._starts[sources] + within


def documents_per_source(documents: Documents, names: Sequence[str]) -> list[int]:
    """Documents of each source; they stand in the order of their sources.

    Args:
        documents: The documents.
        names: Of the sources, in order.
    """
    ends = []
    for name in names:
        low, high = ends[-1] if ends else 0, len(documents)
        while low < high:  # the first document past this source
            middle = (low + high) // 2
            low, high = (middle + 1, high) if documents.source_of(middle) == name else (low, middle)
        ends.append(low)
    return np.diff([0, *ends]).tolist()
