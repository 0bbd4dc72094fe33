"""Transport of heads for streamed blocks on more ranks than heads can be dealt out to: rows of ranks.

Within a row, tokens are exchanged for heads. Across rows every rank gathers the keys and values of a chunk once, when
they are made, and gradients of keys and values are summed over rows once, when they are final; a ring would turn all
keys around once per chunk instead. Of a chunk's queries a row holds an early and a late piece, so that rows work alike.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from freight.ops.layout import LayoutKind, Range, SequenceLayout
from freight.parallel.context_keys import start_sum_by_rank
from freight.parallel.head_transport import Exchange, UlyssesTransport


class RowTransport:
    """A `HeadTransport` whose queries are a row's share of a chunk, and whose keys are the whole chunk's.

    Chunks are dealt out by an `interleaved` layout with rows (`SequenceLayout`, `row`).

    Args:
        heads: Query heads of a rank's tokens.
        groups: Key-value heads of them.
        within: Ranks of this row; None = this rank alone.
        across: Ranks with these heads in all rows.
    """

    def __init__(self, heads: int, groups: int, within: dist.ProcessGroup | None, across: dist.ProcessGroup) -> None:
        self.row = UlyssesTransport(heads, groups, within)
        self.across = across
        self.size = self.row.size * across.size()
        self.first_head = self.row.first_head
        self._orders: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def pieces(self, chunk: Range) -> tuple[Range, ...]:
        """Which tokens of a chunk `[start, stop)` this row's queries are, in their order."""
        share = self._layout(chunk[1] - chunk[0]).share(self.across.rank())
        return tuple((chunk[0] + start, chunk[0] + stop) for start, stop in share)

    def scatter_heads(self, *tensors: Tensor, kv: int = 0) -> tuple[Tensor, ...]:
        """All heads of this rank's tokens -> this rank's heads of the row's queries and of all the chunk's keys.

        Args:
            *tensors: `[tokens, heads, d]`, and last the `kv` ones `[tokens, groups, d]`.
            kv: How many of them have key-value heads.

        Returns:
            Queries in the order of `pieces`, keys in the order of the chunk.

        **Communication**: one all-to-all within the row, one all-gather across rows of the `kv` tensors.
        """
        return self.start_scatter_heads(*tensors, kv=kv).wait()

    def gather_heads(self, *tensors: Tensor, kv: int = 0) -> tuple[Tensor, ...]:
        """The inverse; the `kv` tensors, gradients of all the chunk's keys, are summed over rows.

        **Communication**: one reduce-scatter across rows of the `kv` tensors, one all-to-all within the row.
        """
        return self.start_gather_heads(*tensors, kv=kv).wait()

    def start_scatter_heads(self, *tensors: Tensor, kv: int = 0) -> Exchange:
        """`scatter_heads`; what goes across rows begins when what goes within a row of several ranks is waited for."""
        arriving = self.row.start_scatter_heads(*tensors, kv=kv)
        if self.row.size > 1:
            return arriving.then(lambda *here: self._start_gather(here, kv).wait())
        return self._start_gather(arriving.wait(), kv)

    def start_gather_heads(self, *tensors: Tensor, kv: int = 0) -> Exchange:
        """`gather_heads`; what goes within the row begins when what goes across rows is waited for."""
        queries, keys = tensors[: len(tensors) - kv], tensors[len(tensors) - kv :]
        if not keys:
            return self.row.start_gather_heads(*queries)
        # `[tokens of the chunk, ...]` of every row -> the sum of this row's `[tokens of the row, ...]`
        whole = torch.stack(keys, dim=1)
        summing = start_sum_by_rank(whole.index_select(0, self._order(whole)[1]), self.across)
        return summing.then(lambda total: self.row.gather_heads(*queries, *total.unbind(1), kv=kv))

    def _start_gather(self, here: tuple[Tensor, ...], kv: int) -> Exchange:
        """Keys `[tokens of the row, ...]` -> `[tokens of the chunk, ...]`, under way; queries as they are."""
        queries, keys = here[: len(here) - kv], here[len(here) - kv :]
        if not keys:
            return Exchange(None, lambda: queries)
        mine = torch.stack(keys, dim=1)
        whole = mine.new_empty(self.across.size() * mine.shape[0], *mine.shape[1:])
        work = dist.all_gather_single(whole, mine, group=self.across, async_op=True)
        return Exchange(work, lambda: (*queries, *whole.index_select(0, self._order(whole)[0]).unbind(1)), mine)

    def _order(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Where each token of a chunk stands when rows are put one after another, and the inverse."""
        key = whole.shape[0], whole.device
        if key not in self._orders:
            layout = self._layout(whole.shape[0])
            places = torch.cat([torch.arange(*piece) for row in range(layout.ranks) for piece in layout.share(row)])
            self._orders[key] = layout.inverse().to(whole.device), places.to(whole.device)
        return self._orders[key]

    def _layout(self, tokens: int) -> SequenceLayout:
        """A chunk over rows."""
        return SequenceLayout(LayoutKind.ZIGZAG, tokens, self.across.size())
