"""Where a rank's queries get the keys of other ranks from: nowhere, around a ring, or all at once.

Each is an engine: forward gives the *global* output and log-sum-exp of the rank's queries, backward takes them, so the
terms of every block add up to the whole gradient wherever it was computed. Per rank of R, with t local tokens:

| engine | bytes forward | bytes backward | memory for keys | keys arrive |
|---|---|---|---|---|
| ring | `(R-1) t 2 groups d e` | `(R-1) t 2 groups d (e + 4)` | two blocks of t | under the attention before |
| all-gather | the same | the same | `R t 2 groups d e`, in backward `+ 4` | at once |

Source: Ring Attention, arXiv 2310.01889; all-gather: Llama 3, 2407.21783.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from freight.ops.attention import Schedule, add_backward, schedule_backward, schedule_forward
from freight.ops.attention_blocks import PairDropout
from freight.ops.attention_math import working_dtype
from freight.parallel.head_transport import Exchange


class KeySource(Protocol):
    """Attention of this rank's queries over keys that live on several ranks."""

    def start(self, k: Tensor, v: Tensor) -> Exchange:
        """Begin to fetch keys and values `[tokens, groups, d]`, where all are fetched at once."""
        ...

    def forward(self, q: Tensor, keys: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """`q [tokens, heads, d]` and what `start` gave -> out like q, lse `[heads, tokens]`."""
        ...

    def backward(self, dout: Tensor, q: Tensor, keys: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> Exchange:
        """Gradients of q and of this rank's k and v, the latter maybe on their way."""
        ...


class LocalKeys:
    """All keys are here.

    Args:
        schedule: Of the whole stream.
        dropout: By position.
    """

    def __init__(self, schedule: Schedule, dropout: PairDropout | None) -> None:
        self.schedule, self.dropout = schedule, dropout

    def start(self, k: Tensor, v: Tensor) -> Exchange:
        """Nothing to fetch."""
        return Exchange(None, lambda: (k, v))

    def forward(self, q: Tensor, keys: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """As `KeySource.forward`."""
        k, v = keys
        return schedule_forward(q, k, v, self.schedule, self.dropout)

    def backward(self, dout: Tensor, q: Tensor, keys: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> Exchange:
        """As `KeySource.backward`."""
        k, v = keys
        grads = schedule_backward(dout, q, k, v, out, lse, self.schedule, self.dropout)
        return Exchange(None, lambda: grads)


class GatheredKeys:
    """Keys of all ranks, gathered at once and put in the order of the stream.

    Args:
        schedule: This rank's queries against the whole stream.
        dropout: By position.
        group: Ranks that share the tokens.
        inverse: Where each position of the stream stands when ranks are put one after another; None = in place.
        order: The position at each place; None = in place.
    """

    def __init__(
        self,
        schedule: Schedule,
        dropout: PairDropout | None,
        group: dist.ProcessGroup,
        inverse: Tensor | None,
        order: Tensor | None,
    ) -> None:
        self.schedule, self.dropout, self.group = schedule, dropout, group
        self.inverse, self.order = inverse, order

    def start(self, k: Tensor, v: Tensor) -> Exchange:
        """Gather them.

        **Communication**: one all-gather of k and v.
        """
        mine = torch.stack((k, v), dim=1)  # 2 x [tokens, groups, d] -> [tokens, 2, groups, d]
        whole = mine.new_empty(self.group.size() * mine.shape[0], *mine.shape[1:])
        work = dist.all_gather_single(whole, mine, group=self.group, async_op=True)

        def finish() -> tuple[Tensor, ...]:
            keys = whole if self.inverse is None else whole.index_select(0, self.inverse)
            return keys[:, 0], keys[:, 1]

        return Exchange(work, finish, mine)

    def forward(self, q: Tensor, keys: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """As `KeySource.forward`."""
        k, v = keys
        return schedule_forward(q, k, v, self.schedule, self.dropout)

    def backward(self, dout: Tensor, q: Tensor, keys: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> Exchange:
        """As `KeySource.backward`.

        **Communication**: one reduce-scatter of the gradients of all keys, in float32 (float64 for float64).
        """
        k, v = keys
        dtype = working_dtype(k.dtype)
        dq = torch.zeros_like(q, dtype=dtype)
        dkeys = k.new_zeros(k.shape[0], 2, *k.shape[1:], dtype=dtype)
        grads = dq, dkeys[:, 0], dkeys[:, 1]
        add_backward(self.schedule, dout, q, k, v, out, lse.t(), grads, self.dropout)
        summing = start_sum_by_rank(dkeys if self.order is None else dkeys.index_select(0, self.order), self.group)

        return summing.then(lambda mine: (dq.to(q.dtype), mine[:, 0].to(k.dtype), mine[:, 1].to(v.dtype)))


def start_sum_by_rank(whole: Tensor, group: dist.ProcessGroup) -> Exchange:
    """`[ranks * tokens, ...]` on every rank -> this rank's `[tokens, ...]` of their sum, under way.

    **Communication**: one reduce-scatter. On a CPU gloo would make it of an all-reduce, which sends everything twice:
    there the parts are sent to their ranks and added in rank order.
    """
    ranks = group.size()
    if whole.device.type == "cpu":
        parts = torch.empty_like(whole)
        work = dist.all_to_all_single(parts, whole, group=group, async_op=True)
        return Exchange(work, lambda: (parts.unflatten(0, (ranks, -1)).sum(0),), whole)
    mine = whole.new_empty(whole.shape[0] // ranks, *whole.shape[1:])
    work = dist.reduce_scatter_single(mine, whole, group=group, async_op=True)
    return Exchange(work, lambda: (mine,), whole)
