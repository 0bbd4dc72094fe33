"""Ring attention: keys go from rank to rank while the block at hand is computed.

A message is posted before the attention it hides under and waited for after it. In backward the gradients of a block
travel one step behind its keys, in float32, and go home from the last rank that needed them. Which block travels how
far is known to all ranks from integers, so what nobody needs (short windows, short documents) is sent by nobody.

Source: Ring Attention, arXiv 2310.01889.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from freight.ops.attention import Schedule, add_backward, add_forward
from freight.ops.attention_blocks import PairDropout
from freight.ops.attention_math import working_dtype
from freight.parallel.head_transport import Exchange

Message = tuple[Tensor, int]


class Hop(NamedTuple):
    """This rank's queries against the keys of one rank.

    Args:
        schedule: None if no pair is visible.
        dropout: By position.
    """

    schedule: Schedule | None
    dropout: PairDropout | None


class _Row(NamedTuple):
    """This rank's queries in backward, or some of their heads.

    Args:
        dout: Gradient of the output.
        q: `[tokens, heads, d]`.
        out: Over all keys.
        lse: `[tokens, heads]`, over all keys.
        dq: Sum of gradients.
        first_head: Of the heads that are here.
    """

    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    first_head: int = 0

    def halves(self, block: Tensor, gradients: Tensor) -> list[tuple[_Row, Tensor, Tensor]]:
        """The first and the second half of the heads, each with its part of `[2, tokens, groups, d]` twice."""
        heads, groups = self.q.shape[1], block.shape[2]
        middle = groups // 2
        cut = middle * (heads // groups) if groups > 1 else heads // 2  # one key-value head serves both halves
        parts = []
        for (a, b), (c, d) in zip(((0, cut), (cut, heads)), ((0, middle or 1), (middle, groups)), strict=True):
            some = _Row(*(x[:, a:b] for x in self[:5]), first_head=a)
            parts.append((some, block[:, :, c:d], gradients[:, :, c:d]))
        return parts

    def dropped(self, dropout: PairDropout | None) -> PairDropout | None:
        """The dropout of these heads."""
        return dropout and replace(dropout, first_head=dropout.first_head + self.first_head)


class RingKeys:
    """The `KeySource` of a ring.

    Args:
        hops: By rank that the keys come from.
        travel: How many ranks the block of each rank passes on to, at most.
        group: Ranks that share the tokens.
        overlap: False waits for every message at once; same bits, for measuring.
    """

    def __init__(
        self, hops: Sequence[Hop], travel: Sequence[int], group: dist.ProcessGroup, *, overlap: bool = True
    ) -> None:
        self.hops, self.travel, self.group, self.overlap = hops, travel, group, overlap
        self.rank, self.ranks = group.rank(), group.size()
        self.steps = max(travel) + 1

    def start(self, k: Tensor, v: Tensor) -> Exchange:
        """Nothing to fetch yet."""
        return Exchange(None, lambda: (k, v))

    def forward(self, q: Tensor, keys: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """As `KeySource.forward`.

        **Communication**: at most R - 1 messages of this many tokens' k and v, to the next rank.
        """
        dtype = working_dtype(q.dtype)
        out = torch.zeros_like(q, dtype=dtype)
        lse = q.new_full((q.shape[0], q.shape[1]), float("-inf"), dtype=dtype)
        block: Tensor | None = torch.stack(keys)  # 2 x [tokens, groups, d] -> [2, tokens, groups, d]
        for step in range(self.steps):
            arriving = self._pass_on(step, block, keys[0])
            schedule, dropout = self.hops[self._owner(step)]
            if block is not None and schedule is not None:
                merging = step > 0 or not schedule.plan.queries_once
                add_forward(schedule, q, block[0], block[1], out, lse, dropout, merging=merging)
            block = arriving.wait()
        return out.to(q.dtype), lse.t().contiguous()

    def backward(self, dout: Tensor, q: Tensor, keys: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> Exchange:
        """As `KeySource.backward`.

        The own block is computed half before and half after the others: the first message travels under the one half,
        the last one under the other.

        **Communication**: as forward; and as many messages of the gradients of k and v, in float32.
        """
        dtype = working_dtype(q.dtype)
        row = _Row(dout, q, out, lse.t(), torch.zeros_like(q, dtype=dtype))
        own = torch.stack(keys)
        of_own, block = torch.zeros_like(own, dtype=dtype), own
        first, second = row.halves(own, of_own) if self.steps > 1 else ((row, own, of_own), None)
        following = _Arrival([], None)  # gradients of the block that is here
        homeward: list[Message] = []
        for step in range(self.steps):
            arriving = self._pass_on(step, block, keys[0])
            owner, gradients = self._owner(step), None
            if step == 0:
                self._add(owner, *first)
            elif block is not None:
                gradients = torch.zeros_like(block, dtype=dtype)
                self._add(owner, row, block, gradients)
            earlier = following.wait()  # also where only what this rank sent is under way
            if gradients is not None:
                if earlier is not None:
                    gradients += earlier
                if step == self.travel[owner]:
                    homeward.append((gradients, owner))
            if step > 0:
                following = self._pass_on(step, gradients, keys[0], dtype)
            block = arriving.wait()
        received = torch.empty_like(of_own) if self.travel[self.rank] else None
        home = self._post(homeward, received, (self.rank + self.travel[self.rank]) % self.ranks)
        if second is not None:
            self._add(self.rank, *second)

        def finish() -> tuple[Tensor, ...]:
            dk, dv = of_own if received is None else of_own.add_(received)
            return row.dq.to(q.dtype), dk.to(keys[0].dtype), dv.to(keys[1].dtype)

        return Exchange(home, finish)

    def _add(self, owner: int, row: _Row, block: Tensor, gradients: Tensor) -> None:
        """Add the gradients of this rank's queries and the keys of one rank."""
        schedule, dropout = self.hops[owner]
        if schedule is not None:
            grads = row.dq, gradients[0], gradients[1]
            add_backward(schedule, row.dout, row.q, block[0], block[1], row.out, row.lse, grads, row.dropped(dropout))

    def _pass_on(self, step: int, block: Tensor | None, like: Tensor, dtype: torch.dtype | None = None) -> _Arrival:
        """Send what is here on to the next rank where it is needed, and begin to receive from the one before."""
        sent: list[Message] = []
        if block is not None and self.travel[self._owner(step)] > step:
            sent.append((block, (self.rank + 1) % self.ranks))
        received = None
        if self.travel[self._owner(step + 1)] > step:
            received = like.new_empty(2, *like.shape, dtype=dtype or like.dtype)
        return self._post(sent, received, (self.rank - 1) % self.ranks)

    def _post(self, sent: list[Message], received: Tensor | None, source: int) -> _Arrival:
        # Receiving first: gloo sends at twice the rate to a rank that already waits for the message.
        operations = []
        if received is not None:
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        operations += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for x, peer in sent]
        works = dist.batch_isend_irecv(operations) if operations else []
        arrival = _Arrival(works, received, *(x for x, _ in sent))
        if not self.overlap:
            arrival.wait()
        return arrival

    def _owner(self, step: int) -> int:
        """Whose keys are here at a step, if they travel that far."""
        return (self.rank - step) % self.ranks


class _Arrival:
    """Messages under way, and what they bring; may be waited for again."""

    def __init__(self, works: Sequence[Any], received: Tensor | None, *held: Tensor) -> None:
        self._works, self._received, self._held = works, received, held

    def wait(self) -> Tensor | None:
        for work in self._works:
            work.wait()
        self._works, self._held = (), ()
        return self._received
