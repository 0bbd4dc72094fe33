"""Which heads each rank works on when tokens are exchanged for heads: integers only.

Query heads are dealt out in runs that differ by one at most. A rank is sent every key-value head its queries use, so a
head that several ranks need goes to each of them: fewer key-value heads than ranks needs nothing else, and no head is
repeated before the exchange. A rank's heads may be cut into portions, so that one travels while another is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from freight.errors import ConfigError
from freight.ops.layout import Range


class HeadShare(NamedTuple):
    """Query heads `[a, b)` and the key-value heads `[c, d)` they use, by global number."""

    queries: Range
    keys: Range

    @property
    def num_queries(self) -> int:
        """Query heads."""
        return self.queries[1] - self.queries[0]

    @property
    def num_keys(self) -> int:
        """Key-value heads."""
        return self.keys[1] - self.keys[0]


class HeadSplit:
    """How heads are dealt out to ranks.

    Args:
        heads: Query heads.
        groups: Key-value heads; divides `heads`.
        ranks: Ranks, at most `heads`.

    Raises:
        ConfigError: More ranks than query heads.
    """

    def __init__(self, heads: int, groups: int, ranks: int) -> None:
        if ranks > heads:
            raise ConfigError(
                f"`parallel.context` {ranks} with `context_method: ulysses` needs at least {ranks} query heads per "
                f"tensor-parallel rank; there are {heads}. Use `context_method: hybrid`, or `parallel.context` {heads}."
            )
        self.heads, self.groups = heads, groups
        self.per_group = heads // groups
        self.shares = tuple(self._share(rank, ranks) for rank in range(ranks))

    def _share(self, rank: int, ranks: int) -> HeadShare:
        least, extra = divmod(self.heads, ranks)
        start = rank * least + min(rank, extra)
        return self._with_keys(start, start + least + (rank < extra))

    def _with_keys(self, start: int, stop: int) -> HeadShare:
        return HeadShare((start, stop), (start // self.per_group, (stop - 1) // self.per_group + 1))

    def portions(self, count: int) -> list[tuple[HeadShare, ...]]:
        """Every rank's heads in portions of whole key-value heads; as many as all ranks can fill, `count` at most.

        Returns:
            For each portion, the share of each rank. A rank's portions have no head in common.
        """
        count = max(1, min(count, *(share.num_keys for share in self.shares)))
        return [tuple(self._portion(share, number, count) for share in self.shares) for number in range(count)]

    def _portion(self, share: HeadShare, number: int, count: int) -> HeadShare:
        (first, last), (low, high) = share
        below, above = (low + (high - low) * n // count for n in (number, number + 1))
        return self._with_keys(max(first, below * self.per_group), min(last, above * self.per_group))

    def runs(self, share: HeadShare) -> tuple[int, ...] | None:
        """How many query heads of a share use each of its key-value heads; None if all are used alike.

        Kernels find the key-value head of a query themselves only where all are used alike.
        """
        (first, last), (low, high) = share
        edges = [min(max(head * self.per_group, first), last) for head in range(low, high + 1)]
        lengths = tuple(b - a for a, b in pairwise(edges))
        return None if len(set(lengths)) == 1 else lengths


def replicated(shares: Sequence[HeadShare]) -> bool:
    """Whether a key-value head is in two shares."""
    return any(a.keys[1] > b.keys[0] for a, b in pairwise(shares))
