"""Ring attention: keys go from rank to rank while the block at hand is computed.

A message is posted before the attention it hides under and waited for after it. In backward the gradients of a block
travel one step behind its keys, in float32, and go home from the last rank that needed them. Which block travels how
far is known to all ranks from integers, so what nobody needs (short windows, short documents) is sent by nobody.

Source: Ring Attention, arXiv 2310.01889.
"""

from __future__ import annotations

from collections.abc import Sequence
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

        **Communication**: as forward; and messages of the gradients of k and v in float32, one more than of keys.
        """
        dtype = working_dtype(q.dtype)
        dq, by_token = torch.zeros_like(q, dtype=dtype), lse.t()
        block: Tensor | None = torch.stack(keys)
        following = _Arrival([], None)  # gradients of the block that is here
        homeward: list[Message] = []
        mine: Tensor | None = None
        for step in range(self.steps):
            arriving = self._pass_on(step, block, keys[0])
            owner, gradients = self._owner(step), None
            if block is not None:
                gradients = torch.zeros_like(block, dtype=dtype)
                schedule, dropout = self.hops[owner]
                if schedule is not None:
                    grads = dq, gradients[0], gradients[1]
                    add_backward(schedule, dout, q, block[0], block[1], out, by_token, grads, dropout)
            earlier = following.wait()
            if gradients is not None:
                if earlier is not None:
                    gradients += earlier
                if step == 0 and self.travel[owner] == 0:
                    mine = gradients
                elif step == self.travel[owner]:
                    homeward.append((gradients, owner))
            following = self._pass_on(step, gradients, keys[0], dtype)
            block = arriving.wait()
        return self._bring_home(homeward, mine, keys, dq.to(q.dtype), dtype)

    def _pass_on(self, step: int, block: Tensor | None, like: Tensor, dtype: torch.dtype | None = None) -> _Arrival:
        """Send what is here on to the next rank where it is needed, and begin to receive from the one before."""
        sent: list[Message] = []
        if block is not None and self.travel[self._owner(step)] > step:
            sent.append((block, (self.rank + 1) % self.ranks))
        received = None
        if self.travel[self._owner(step + 1)] > step:
            received = like.new_empty(2, *like.shape, dtype=dtype or like.dtype)
        return self._post(sent, received, (self.rank - 1) % self.ranks)

    def _bring_home(
        self, homeward: list[Message], mine: Tensor | None, keys: tuple[Tensor, ...], dq: Tensor, dtype: torch.dtype
    ) -> Exchange:
        """Send finished gradients to their owners; receive those of this rank's keys."""
        received = None if mine is not None else keys[0].new_empty(2, *keys[0].shape, dtype=dtype)
        arrival = self._post(homeward, received, (self.rank + self.travel[self.rank]) % self.ranks)

        def finish() -> tuple[Tensor, ...]:
            dkeys = mine if mine is not None else received
            assert dkeys is not None
            return dq, dkeys[0].to(keys[0].dtype), dkeys[1].to(keys[1].dtype)

        return Exchange(arrival, finish)

    def _post(self, sent: list[Message], received: Tensor | None, source: int) -> _Arrival:
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for x, peer in sent]
        if received is not None:
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
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
