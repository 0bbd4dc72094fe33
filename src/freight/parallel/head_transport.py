"""Tokens of all heads against all tokens of some heads: one all-to-all each way.

Queries, keys and values travel together, packed by destination. What arrives from the ranks in order is the whole
stream (or chunk) in order, so nothing is reordered: q, k and v are views of what was received. Bytes per rank for
t tokens of P ranks, forward: `t (P-1)/P (2 heads d e)` for queries and output, and one copy of a key-value head for
every other rank that needs it. Where a rank's queries do not use its key-value heads alike, each of these is repeated
after the exchange for every query head that uses it, and their gradients are summed before it.

Source: DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freight.ops.attention_math import working_dtype
from freight.ops.layout import Range
from freight.parallel.head_split import HeadShare, HeadSplit, replicated


class Exchange:
    """A collective under way.

    Args:
        work: To be waited for; None if there is nothing to wait for.
        finish: Makes the result of what arrived.
        held: What must stay alive until then.
    """

    def __init__(self, work: Any, finish: Callable[[], tuple[Tensor, ...]], *held: Tensor) -> None:
        self._work, self._finish, self._held = work, finish, held

    def arrived(self) -> Exchange:
        """This exchange, once nothing is under way any more."""
        if self._work is not None:
            self._work.wait()
        self._work, self._held = None, ()
        return self

    def then(self, function: Callable[..., tuple[Tensor, ...]]) -> Exchange:
        """This exchange with something done to its result; take that one's place."""
        finish = self._finish
        return Exchange(self._work, lambda: function(*finish()), *self._held)

    def wait(self) -> tuple[Tensor, ...]:
        """The result; called once, after which the exchange holds nothing."""
        finish = self.arrived()._finish
        self._finish = tuple
        return finish()


class UlyssesTransport:
    """Exchange over one process group; the `HeadTransport` of `ops/protocols.py`.

    Args:
        heads: Query heads of a rank's tokens.
        groups: Key-value heads of them.
        group: Ranks that share the tokens, in the order of their tokens; None = this rank alone.
        shares: The heads of each rank that travel; by default all of them.
    """

    def __init__(
        self, heads: int, groups: int, group: dist.ProcessGroup | None, shares: Sequence[HeadShare] | None = None
    ) -> None:
        self.group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.heads, self.groups = heads, groups
        split = HeadSplit(heads, groups, self.size)
        self.shares = tuple(shares or split.shares)
        self.first_head = self.share.queries[0]
        self._runs = split.runs(self.share)

    @property
    def share(self) -> HeadShare:
        """This rank's heads."""
        return self.shares[self.rank]

    @property
    def num_keys(self) -> int:
        """Key-value heads of this rank as `scatter_heads` gives them."""
        return self.share.num_keys if self._runs is None else self.share.num_queries

    def pieces(self, chunk: Range) -> tuple[Range, ...]:
        """Which tokens of a chunk the queries are: all."""
        return (chunk,)

    def scatter_heads(self, *tensors: Tensor, kv: int = 0) -> tuple[Tensor, ...]:
        """All heads of this rank's tokens -> this rank's heads of all tokens.

        Args:
            *tensors: `[tokens, heads, d]`, and last the `kv` ones `[tokens, groups, d]`; one dtype.
            kv: How many of them have key-value heads.

        Returns:
            `[size * tokens, heads of this rank, d]` each, tokens in rank order.

        **Communication**: one all-to-all.
        """
        return self.start_scatter_heads(*tensors, kv=kv).wait()

    def gather_heads(self, *tensors: Tensor, kv: int = 0) -> tuple[Tensor, ...]:
        """The inverse; key-value heads that several ranks hold are summed in rank order, in float32.

        **Communication**: one all-to-all.
        """
        return self.start_gather_heads(*tensors, kv=kv).wait()

    def start_scatter_heads(self, *tensors: Tensor, kv: int = 0) -> Exchange:
        """`scatter_heads`, under way."""
        tokens, _, dim = tensors[0].shape
        columns = [self._columns(share, len(tensors), kv) for share in self.shares]
        if self.size == 1:
            return Exchange(None, lambda: tuple(_narrow(x, r) for x, r in zip(tensors, columns[0], strict=True)))
        widths = [sum(stop - start for start, stop in of_rank) for of_rank in columns]
        # [tokens, heads, d] of each tensor -> for each rank [tokens, its heads of all tensors, d]
        sent = tensors[0].new_empty(tokens * sum(widths) * dim)
        slots = sent.split([tokens * width * dim for width in widths])
        for slot, width, of_rank in zip(slots, widths, columns, strict=True):
            parts = [_narrow(x, heads) for x, heads in zip(tensors, of_rank, strict=True)]
            torch.cat(parts, dim=1, out=slot.view(tokens, width, dim))
        width = widths[self.rank]
        received = sent.new_empty(self.size * tokens, width, dim)
        work = self._all_to_all(received.view(-1), sent, [tokens * width * dim] * self.size, [s.numel() for s in slots])
        sizes = [stop - start for start, stop in columns[self.rank]]

        def finish() -> tuple[Tensor, ...]:
            parts = received.split(sizes, dim=1)
            return *parts[: len(parts) - kv], *map(self._repeated, parts[len(parts) - kv :])

        return Exchange(work, finish, sent)

    def start_gather_heads(self, *tensors: Tensor, kv: int = 0, into: Sequence[Tensor] | None = None) -> Exchange:
        """`gather_heads`, under way.

        Args:
            *tensors: `[size * tokens, heads of this rank, d]`; one dtype.
            kv: How many of the last have key-value heads.
            into: Where results are put: `[tokens, heads, d]` each, the last `kv` added to `[tokens, groups, d]`.
        """
        columns = [self._columns(share, len(tensors), kv) for share in self.shares]
        tensors = *tensors[: len(tensors) - kv], *map(self._summed, tensors[len(tensors) - kv :])
        first, dim = tensors[0], tensors[0].shape[2]
        tokens = first.shape[0] // self.size
        if self.size == 1 and into is None and self.share == HeadShare((0, self.heads), (0, self.groups)):
            return Exchange(None, lambda: tensors)
        # [size * tokens, heads, d] of each tensor -> one after another; a rank's tokens are adjacent
        sent = torch.cat(tensors, dim=1) if len(tensors) > 1 else first.contiguous()
        sizes = [tokens * dim * sum(stop - start for start, stop in of_rank) for of_rank in columns]
        received, work = sent.view(-1), None
        if self.size > 1:
            received = sent.new_empty(sum(sizes))
            work = self._all_to_all(received, sent.view(-1), sizes, [sizes[self.rank]] * self.size)

        # What was sent is let go when all has arrived: `finish` holds none of it.
        count, dtype = len(tensors), sent.dtype

        def finish() -> tuple[Tensor, ...]:
            results = into or self._empty(received, (tokens, dim), count, kv)
            for slot, of_rank in zip(received.split(sizes), columns, strict=True):
                parts = slot.view(tokens, -1, dim).split([stop - start for start, stop in of_rank], dim=1)
                for number, (result, part, heads) in enumerate(zip(results, parts, of_rank, strict=True)):
                    target = _narrow(result, heads)
                    target.copy_(part) if number < count - kv else target.add_(part)
            return tuple(results) if into else tuple(result.to(dtype) for result in results)

        return Exchange(work, finish, sent)

    def _repeated(self, x: Tensor) -> Tensor:
        """`[tokens, key-value heads, d]` -> one for every query head, where their uses differ."""
        if self._runs is None:
            return x
        return torch.cat([x[:, i : i + 1].expand(-1, run, -1) for i, run in enumerate(self._runs)], dim=1)

    def _summed(self, grad: Tensor) -> Tensor:
        """The gradient of x from that of `_repeated(x)`."""
        if self._runs is None:
            return grad
        dtype = working_dtype(grad.dtype)
        return torch.stack([part.sum(1, dtype=dtype) for part in grad.split(self._runs, dim=1)], dim=1).to(grad.dtype)

    def _empty(self, like: Tensor, shape: tuple[int, int], count: int, kv: int) -> list[Tensor]:
        """Where heads `[tokens, heads, d]` come home: key-value heads to zeros, as some may come from several ranks."""
        tokens, dim = shape
        dtype = working_dtype(like.dtype) if replicated(self.shares) else like.dtype
        queries = [like.new_empty(tokens, self.heads, dim) for _ in range(count - kv)]
        return [*queries, *(like.new_zeros(tokens, self.groups, dim, dtype=dtype) for _ in range(kv))]

    def _columns(self, share: HeadShare, count: int, kv: int) -> list[tuple[int, int]]:
        """The heads of each of `count` tensors that belong to a share."""
        return [share.queries] * (count - kv) + [share.keys] * kv

    def _all_to_all(self, received: Tensor, sent: Tensor, receive: list[int], send: list[int]) -> Any:
        equal = len({*receive, *send}) == 1
        return dist.all_to_all_single(
            received, sent, None if equal else receive, None if equal else send, group=self.group, async_op=True
        )


def _narrow(x: Tensor, heads: tuple[int, int]) -> Tensor:
    return x if heads == (0, x.shape[1]) else x[:, heads[0] : heads[1]]
