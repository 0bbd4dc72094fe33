"""Context parallelism: attention when the tokens of a microbatch are spread over ranks.

Every method is a transport of heads within a row of ranks and a source of keys across rows. Ulysses is one row: tokens
are exchanged for heads, then all keys are here. Ring and all-gather are rows of one rank. The hybrid is both: heads
within a row, a ring between rows. One autograd function around them keeps q, k, v, the output and its log-sum-exp,
whatever travels.

Everything that can travel early does: heads are exchanged in portions, so that one travels while another is computed.
`overlap=False` waits at once for every message and computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from freight.ops.attention import LocalAttention, Schedule, pair_dropout
from freight.ops.attention_math import working_dtype
from freight.ops.batch import TokenBatch
from freight.ops.layout import LayoutKind, SequenceLayout
from freight.ops.protocols import AttentionSpec
from freight.ops.shard_plan import build_shard_plan, travel
from freight.parallel.context_keys import GatheredKeys, KeySource, LocalKeys
from freight.parallel.context_method import ContextChoice, ContextMethod
from freight.parallel.context_ring import Hop, RingKeys
from freight.parallel.head_split import HeadSplit, replicated
from freight.parallel.head_transport import Exchange, UlyssesTransport
from freight.parallel.mesh import Axis, context_axes


class Portion(NamedTuple):
    """Some heads: how they travel within the row, and where their keys come from."""

    transport: UlyssesTransport
    keys: KeySource


class ContextAttention:
    """The attention core of a model whose tokens are spread over the context axis.

    Args:
        choice: Method and ranks in a row, of `choose_context_method`.
        mesh: Of `build_mesh`, with a context axis.
        local: Chooses kernels.
        overlap: False waits for every message at once.
        head_portions: Portions that heads are exchanged in, if there are key-value heads enough.

    **Communication**: creates two groups for the hybrid; made once, on all ranks alike.
    """

    def __init__(
        self,
        choice: ContextChoice,
        mesh: DeviceMesh,
        local: LocalAttention,
        *,
        overlap: bool = True,
        head_portions: int = 4,
    ) -> None:
        axis = mesh[Axis.CP]
        self.choice, self.local, self.overlap = choice, local, overlap
        self.rank, self.ranks = axis.get_local_rank(), axis.size()
        self.across = self.within = None
        if choice.ulysses == 1:
            self.across = axis.get_group()
        elif choice.ulysses == self.ranks:
            self.within = axis.get_group()
        else:
            rows, row = context_axes(mesh, choice.ulysses)
            self.across, self.within = rows.get_group(), row.get_group()
        # A ring already hides its messages, and half as large ones would cost more.
        self.head_portions = head_portions if choice.method in (ContextMethod.ULYSSES, ContextMethod.ALL_GATHER) else 1

    def layout(self, batch: TokenBatch) -> SequenceLayout:
        """How a stream is dealt out for this method."""
        return self.choice.layout(batch.stream_tokens, self.ranks, batch.cu_seqlens)

    def shard(self, batch: TokenBatch) -> TokenBatch:
        """This rank's part of a microbatch."""
        return batch.local(self.layout(batch), self.rank)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: TokenBatch, spec: AttentionSpec) -> Tensor:
        """Context of this rank's tokens; 0 at padding.

        Args:
            q: `[tokens, heads, head_dim]`, of this rank's tokens.
            k: `[tokens, groups, head_dim]`.
            v: Like k.
            batch: Of `shard`.
            spec: Scale, window, softcap, dropout.
        """
        return _attend(self, q, k, v, batch, spec)

    def portions(self, q: Tensor, k: Tensor, batch: TokenBatch, spec: AttentionSpec) -> tuple[Portion, ...]:
        """How one layer of one microbatch is done; made of integers, shared by layers where they are many."""
        heads, groups = q.shape[1], k.shape[1]
        size = 1 if self.within is None else self.within.size()

        def make() -> list[UlyssesTransport]:
            of_portions = HeadSplit(heads, groups, size).portions(self.head_portions)
            return [UlyssesTransport(heads, groups, self.within, shares) for shares in of_portions]

        portions = []
        for transport in batch.cached(("transports", heads, groups), make):
            queries, keys = q[:, : transport.share.num_queries], q[:, : transport.num_keys]
            portions.append(Portion(transport, self._source(queries, keys, batch, spec, transport.first_head)))
        return tuple(portions)

    def _source(self, q: Tensor, k: Tensor, batch: TokenBatch, spec: AttentionSpec, first_head: int) -> KeySource:
        layout = batch.layout
        assert layout is not None and (layout.ranks, batch.rank) == (self.ranks, self.rank), "a batch of `shard`"
        if self.across is None:
            assert layout.kind == LayoutKind.CONTIGUOUS, "tokens of a row in rank order are the stream"
            schedule = self.local.schedule_of(q, k, batch, spec)
            return LocalKeys(schedule, pair_dropout(batch, spec, first_head=first_head))
        assert layout.rows == self.across.size(), "rows of the layout are the ranks across"
        if self.choice.method == ContextMethod.ALL_GATHER:
            return self._gathered(q, k, batch, spec, layout, first_head)
        return self._ring(q, k, batch, spec, layout, first_head)

    def _gathered(
        self, q: Tensor, k: Tensor, batch: TokenBatch, spec: AttentionSpec, layout: SequenceLayout, first_head: int
    ) -> KeySource:
        assert self.across is not None
        part = {"queries": layout.share(self.across.rank()), "keys": [(0, layout.tokens)]}
        schedule = batch.cached(
            ("gathered", self.local.key(q, k, spec)),
            lambda: self.local.schedule(q, k, batch, spec, build_shard_plan, **part),
        )
        inverse = order = None
        if layout.kind != LayoutKind.CONTIGUOUS:
            inverse = batch.cached("inverse of the layout", lambda: layout.inverse().to(q.device))
            order = batch.cached("order of the layout", lambda: inverse.argsort())
        dropout = pair_dropout(batch, spec, first_head=first_head, q_numbers=batch.token_numbers)
        return GatheredKeys(schedule, dropout, self.across, inverse, order)

    def _ring(
        self, q: Tensor, k: Tensor, batch: TokenBatch, spec: AttentionSpec, layout: SequenceLayout, first_head: int
    ) -> KeySource:
        assert self.across is not None
        row, rows = self.across.rank(), self.across.size()

        def make() -> tuple[tuple[Schedule | None, ...], tuple[int, ...]]:
            schedules = [
                self.local.schedule(
                    q, k, batch, spec, build_shard_plan, queries=layout.share(row), keys=layout.share(owner)
                )
                for owner in range(rows)
            ]
            far = travel(layout, batch.cu_seqlens, batch.lengths, causal=spec.causal, window=spec.window)
            return tuple(schedule if schedule.plan.entries else None for schedule in schedules), far

        schedules, far = batch.cached(("ring", self.local.key(q, k, spec)), make)
        numbers: list[Tensor | None] = [None] * rows
        if spec.dropout:
            numbers = batch.cached("numbers of shares", lambda: [_numbers(layout, n).to(q.device) for n in range(rows)])
        drop = partial(pair_dropout, batch, spec, first_head=first_head, q_numbers=numbers[row])
        hops = [Hop(schedule, drop(k_numbers=of)) for schedule, of in zip(schedules, numbers, strict=True)]
        return RingKeys(hops, far, self.across, overlap=self.overlap)


def _numbers(layout: SequenceLayout, row: int) -> Tensor:
    """int64: place in the stream of each token of a share."""
    return torch.cat([torch.arange(start, stop) for start, stop in layout.share(row)])


def _attend_eagerly(
    core: ContextAttention, q: Tensor, k: Tensor, v: Tensor, batch: TokenBatch, spec: AttentionSpec
) -> Tensor:
    portions = core.portions(q, k, batch, spec)
    return _Attention.apply(q, k, v, portions, core.overlap)  # pyright: ignore[reportReturnType]


# Outside compiled graphs: a plan is new integers every microbatch, and each would compile anew.
_attend = cast(Callable[..., Tensor], torch.compiler.disable(_attend_eagerly))


class _Attention(torch.autograd.Function):
    """`(q, k, v, portions, overlap) -> context`; there is no second derivative.

    **Gradient**: as `BlockAttention`: every block takes the global output and log-sum-exp, and its terms are added up,
    wherever they were computed, in float32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, portions: tuple[Portion, ...], overlap: bool) -> Tensor:
        begun = _Beginner(overlap)
        into = None if len(portions) == 1 else [torch.empty_like(q)]
        kept: list[Tensor] = []
        gathers: list[Exchange] = []

        def begin_heads(number: int) -> Exchange:
            return begun(portions[number].transport.start_scatter_heads(q, k, v, kv=2))

        def begin_keys(number: int, here: tuple[Tensor, ...]) -> Exchange:
            return begun(portions[number].keys.start(here[1], here[2]))

        arrivals = _arrivals(begin_heads, begin_keys, portions)
        for portion, (here, keys) in zip(portions, arrivals, strict=True):
            out, lse = portion.keys.forward(here[0], keys)
            kept += (*here, out, lse)
            gathers.append(begun(portion.transport.start_gather_heads(out, into=into)))
        ctx.portions, ctx.overlap, ctx.like = portions, overlap, [(x.shape, x.dtype) for x in (q, k, v)]
        ctx.save_for_backward(*kept)
        return [gather.wait() for gather in gathers][-1][0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        begun, portions, saved = _Beginner(ctx.overlap), ctx.portions, ctx.saved_tensors
        kept = [saved[i : i + 5] for i in range(0, len(saved), 5)]
        into = None if len(portions) == 1 else _gradients(portions, grads[0], ctx.like)
        returns: list[Exchange] = []
        gathers: list[Exchange] = []

        def begin_heads(number: int) -> Exchange:
            return begun(portions[number].transport.start_scatter_heads(grads[0]))

        def begin_keys(number: int, here: tuple[Tensor, ...]) -> Exchange:
            _, k, v, _, _ = kept[number]
            return begun(portions[number].keys.start(k, v))

        def send_home(number: int) -> None:
            gradients = returns[number].wait()
            gathers.append(begun(portions[number].transport.start_gather_heads(*gradients, kv=2, into=into)))

        for number, ((dout,), keys) in enumerate(_arrivals(begin_heads, begin_keys, portions)):
            q, _, _, out, lse = kept[number]
            returns.append(begun(portions[number].keys.backward(dout, q, keys, out, lse)))
            if portions[number].transport.size > 1:
                send_home(number)
        for number in range(len(gathers), len(portions)):
            send_home(number)
        dq, dk, dv = (x.to(dtype) for x, (_, dtype) in zip([g.wait() for g in gathers][-1], ctx.like, strict=True))
        return dq, dk, dv, None, None


class _Beginner:
    """What is begun goes on by itself; without overlap it is waited for at once."""

    def __init__(self, overlap: bool) -> None:
        self.overlap = overlap

    def __call__(self, exchange: Exchange) -> Exchange:
        return exchange if self.overlap else exchange.arrived()


def _arrivals(
    begin_heads: Callable[[int], Exchange],
    begin_keys: Callable[[int, tuple[Tensor, ...]], Exchange],
    portions: tuple[Portion, ...],
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """What each portion needs: its heads, and its keys. While it is computed, what the next one waits for travels.

    Not more than that: two messages at once share the wire, and the one that is needed first would come late.
    """
    last = len(portions) - 1
    heads = begin_heads(0)
    if portions[0].transport.size > 1:
        for number in range(len(portions)):
            here = heads.wait()
            if number < last:
                heads = begin_heads(number + 1)
            yield here, begin_keys(number, here).wait()
        return
    here = heads.wait()
    keys = begin_keys(0, here)
    for number in range(len(portions)):
        arrived = here, keys.wait()
        if number < last:
            here = begin_heads(number + 1).wait()
            keys = begin_keys(number + 1, here)
        yield arrived


def _gradients(
    portions: tuple[Portion, ...], like: Tensor, shapes: list[tuple[torch.Size, torch.dtype]]
) -> list[Tensor]:
    """Where the gradients of all portions come together; key-value heads that several ranks hold add up in float32."""
    (q, q_dtype), *keys = shapes
    held = [heads for portion in portions for heads in portion.transport.shares]
    shared = replicated(sorted(held, key=lambda share: share.keys))
    return [
        like.new_empty(q, dtype=q_dtype),
        *(like.new_zeros(shape, dtype=working_dtype(dtype) if shared else dtype) for shape, dtype in keys),
    ]
