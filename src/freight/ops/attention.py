"""Attention over one microbatch on one device: a plan, its kernels, and one autograd function around them.

`BlockAttention` runs every block of a plan, merges, and keeps q, k, v, the output and its log-sum-exp. Its backward
gives each block the *global* output and log-sum-exp; letting autograd through the merge instead loses the log-sum-exp
term and yields wrong dq and dk beside a right dv.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freight.ops.attention_backends import (
    Backend,
    Choice,
    Hardware,
    Request,
    choose_backend,
    hardware_of,
    missing_backends,
)
from freight.ops.attention_blocks import Block, PairDropout, merge
from freight.ops.attention_mask import MaskKind
from freight.ops.attention_math import working_dtype
from freight.ops.attention_plan import AttentionPlan, PlanEntry, build_plan
from freight.ops.batch import TokenBatch
from freight.ops.protocols import AttentionSpec

# CUDA launches at most 65,535 blocks along one dim of a grid.
CUDA_GRID = 65_535


@dataclass(frozen=True, eq=False)
class Schedule:
    """A plan with its kernels: what all layers of a microbatch with one window share."""

    plan: AttentionPlan
    forward: tuple[Block, ...]
    backward: tuple[Block, ...]


class BlockAttention(torch.autograd.Function):
    """`(q, k, v, schedule, dropout) -> (context, lse)`; lse has no gradient, and there is no second derivative.

    **Gradient**: `p = exp(s - lse)`, `D = rowsum(dout * out)`, `ds = p (dout v^T - D)`, summed over blocks in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, dropout: PairDropout | None
    ) -> tuple[Tensor, Tensor]:
        """`q [tokens, heads, d]`, `k, v [tokens, groups, d]` -> context like q, lse `[heads, tokens]`."""
        out, lse = schedule_forward(q, k, v, schedule, dropout)
        ctx.schedule, ctx.dropout = schedule, dropout
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of q, k, v; exactly 0 at padding."""
        q, k, v, out, lse = ctx.saved_tensors
        return *schedule_backward(dout, q, k, v, out, lse, ctx.schedule, ctx.dropout), None, None


def schedule_forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, dropout: PairDropout | None
) -> tuple[Tensor, Tensor]:
    """Attention by one schedule: out like q, lse `[heads, tokens]`; 0 and `-inf` where nothing was seen."""
    plan = schedule.plan
    dtype = working_dtype(q.dtype)
    once = plan.queries_once
    out = _buffer(q, q.dtype if once else dtype, plan.idle_queries if once else None)
    lse = q.new_full((q.shape[0], q.shape[1]), float("-inf"), dtype=dtype)
    add_forward(schedule, q, k, v, out, lse, dropout, merging=not once)
    return out.to(q.dtype), lse.t().contiguous()


def add_forward(
    schedule: Schedule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout: PairDropout | None = None,
    *,
    merging: bool = True,
) -> None:
    """Attention over the keys of one schedule, merged into what was found over others, in place.

    Args:
        schedule: Its plan's queries are rows of q, its keys rows of k and v.
        q: `[tokens, heads, d]`.
        k: `[key tokens, groups, d]`.
        v: Like k.
        out: Like q, float32 (float64 for float64); 0 where nothing was seen yet. Any float dtype without merging.
        lse: `[tokens, heads]`, float32 or float64; `-inf` where nothing was seen yet.
        dropout: By position.
        merging: False writes instead: right where no query is in two blocks or was seen before.
    """
    for block in schedule.forward:
        block_out, block_lse = block.forward(q, k, v, dropout)
        block_lse = block_lse.transpose(1, 2)
        rows = block.q_rows
        if merging:
            block_out, block_lse = merge(rows.take(out), rows.take(lse), block_out, block_lse)
        rows.put(out, block_out)
        rows.put(lse, block_lse)


def schedule_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    schedule: Schedule,
    dropout: PairDropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; exactly 0 where nothing was seen."""
    plan = schedule.plan
    dtype = working_dtype(q.dtype)
    grads = (
        _buffer(q, q.dtype if plan.queries_once else dtype, plan.idle_queries if plan.queries_once else None),
        _buffer(k, k.dtype if plan.keys_once else dtype, plan.idle_keys if plan.keys_once else None),
        _buffer(v, v.dtype if plan.keys_once else dtype, plan.idle_keys if plan.keys_once else None),
    )
    adding = not plan.queries_once, not plan.keys_once
    add_backward(schedule, dout, q, k, v, out, lse.t(), grads, dropout, adding=adding)
    dq, dk, dv = (grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def add_backward(
    schedule: Schedule,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    dropout: PairDropout | None = None,
    *,
    adding: tuple[bool, bool] = (True, True),
) -> None:
    """Gradients over the keys of one schedule, added to those over others, in place.

    Args:
        schedule: As in `add_forward`.
        dout: Gradient of the output, like q.
        q: As in `add_forward`.
        k: As in `add_forward`.
        v: As in `add_forward`.
        out: The rows' **global** output, over all schedules.
        lse: The rows' **global** log-sum-exp, `[tokens, heads]`.
        grads: Accumulators of q, k and v; float32 (float64 for float64) where they are added to.
        dropout: As in forward.
        adding: Whether gradients of q, and of k and v, are added; False writes.
    """
    for block in schedule.backward:
        dq, dk, dv = block.backward(dout, q, k, v, out, lse, dropout)
        block.q_rows.put(grads[0], dq, add=adding[0])
        block.k_rows.put(grads[1], dk, add=adding[1])
        block.k_rows.put(grads[2], dv, add=adding[1])


def _buffer(like: Tensor, dtype: torch.dtype, idle: Sequence[tuple[int, int]] | None) -> Tensor:
    """Rows for results: zeroed where no block will write, or everywhere if `idle` is None."""
    if idle is None:
        return like.new_zeros(like.shape, dtype=dtype)
    buffer = like.new_empty(like.shape, dtype=dtype)
    for start, stop in idle:
        buffer[start:stop] = 0
    return buffer


class LocalAttention:
    """The attention core of a model whose tokens are all on one device.

    Args:
        backend: `auto`, or a kernel to insist on.
        disable: Kernels not to use.
        deterministic: Only kernels whose backward gives the same bits each time.
    """

    def __init__(self, backend: str = "auto", disable: Sequence[str] = (), deterministic: bool = False) -> None:
        self.backend = backend
        self.disabled = frozenset(disable) | missing_backends()
        self.deterministic = deterministic

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: TokenBatch, spec: AttentionSpec) -> Tensor:
        """Context of every token; 0 at padding.

        Args:
            q: `[tokens, heads, head_dim]`.
            k: `[tokens, groups, head_dim]`.
            v: Like k.
            batch: Where documents lie.
            spec: Scale, window, softcap, dropout.

        Raises:
            ConfigError: No allowed kernel can do it.
        """
        return _attend(self, q, k, v, batch, spec)

    def schedule_of(self, q: Tensor, k: Tensor, batch: TokenBatch, spec: AttentionSpec) -> Schedule:
        """The whole stream's schedule, made by the first layer that asks for it."""
        return batch.cached(("attention", self.key(q, k, spec)), lambda: self.schedule(q, k, batch, spec))

    def key(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> Hashable:
        """What schedules of one microbatch depend on."""
        shared = replace(spec, layer=0)  # layers differ in what they drop, which is no part of a schedule
        settings = (self.backend, self.disabled, self.deterministic)
        return settings, shared, q.dtype, q.shape[1:], k.shape[1:], q.device

    def schedule(
        self,
        q: Tensor,
        k: Tensor,
        batch: TokenBatch,
        spec: AttentionSpec,
        build: Callable[..., AttentionPlan] = build_plan,
        **ranges: Any,
    ) -> Schedule:
        """A plan of the microbatch and the kernel of each of its blocks; arguments as in `plan`."""
        plan = self.plan(q, k, batch, spec, batch.cu_seqlens, batch.lengths, build=build, **ranges)
        return Schedule(plan, *self.kernels(q, k, batch, spec, plan.entries))

    def plan(
        self,
        q: Tensor,
        k: Tensor,
        batch: TokenBatch,
        spec: AttentionSpec,
        cu_seqlens: Sequence[int],
        lengths: Sequence[int],
        *,
        build: Callable[..., AttentionPlan] = build_plan,
        **ranges: Any,
    ) -> AttentionPlan:
        """The blocks of some segments of a microbatch, as this core's kernels want them.

        Args:
            q: Queries; only their heads, dtype and device matter.
            k: Keys, likewise.
            batch: The microbatch; kernels are chosen by its longest document.
            spec: What the layer asks.
            cu_seqlens: Borders of the segments.
            lengths: Their real tokens.
            build: `build_plan`, or one like it.
            **ranges: What else it takes: `q_blocks` and `kv_blocks`, say.
        """
        hardware = hardware_of(q.device)
        window = spec.window if spec.window is not None and spec.window < batch.max_seqlen else None
        request = self._request(q, k, spec, _stream_kind(batch, spec, window), batch.max_seqlen, _equal(batch))
        style = self.choose(hardware, request).forward
        return build(
            cu_seqlens,
            lengths,
            causal=spec.causal,
            window=window,
            varlen=style.varlen,
            native_window=style.window,
            max_segments=CUDA_GRID // q.shape[1] if hardware.device == "cuda" else None,
            **ranges,
        )

    def kernels(
        self, q: Tensor, k: Tensor, batch: TokenBatch, spec: AttentionSpec, entries: Sequence[PlanEntry]
    ) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
        """The kernel of each block of a plan, forward and backward."""
        hardware = hardware_of(q.device)
        forward, backward = [], []
        for entry in entries:
            longest = max(b - a for ranges in entry.segments() for a, b in ranges)
            request = self._request(q, k, spec, entry.mask.kind, longest, _equal(batch))
            choice = self.choose(hardware, request)
            forward.append(_block(entry, choice.forward, spec, self.deterministic))
            backward.append(_block(entry, choice.backward, spec, self.deterministic))
        return tuple(forward), tuple(backward)

    def choose(self, hardware: Hardware, request: Request) -> Choice:
        """`choose_backend` with this core's settings."""
        return choose_backend(hardware, request, backend=self.backend, disabled=self.disabled)

    def _request(
        self, q: Tensor, k: Tensor, spec: AttentionSpec, kind: MaskKind, tokens: int, equal_lengths: bool
    ) -> Request:
        return Request(
            dtype=q.dtype,
            head_dim=q.shape[2],
            num_heads=q.shape[1],
            num_query_groups=k.shape[1],
            tokens_q=tokens,
            tokens_k=tokens,
            kind=kind,
            equal_lengths=equal_lengths,
            softcap=spec.softcap,
            dropout=spec.dropout,
            deterministic=self.deterministic,
        )


def pair_dropout(batch: TokenBatch, spec: AttentionSpec, **places: Any) -> PairDropout | None:
    """What a layer drops; None without dropout.

    Args:
        batch: Seed, step and microbatch.
        spec: Rate and layer.
        **places: Where the tensors begin, or their tokens' numbers: fields of `PairDropout`.
    """
    if not spec.dropout:
        return None
    return PairDropout(spec.dropout, (batch.seed, batch.step, batch.microbatch, spec.layer), **places)


def _attend_eagerly(
    core: LocalAttention, q: Tensor, k: Tensor, v: Tensor, batch: TokenBatch, spec: AttentionSpec
) -> Tensor:
    assert batch.layout is None, "tokens on several ranks need a core of context parallelism"
    context, _ = BlockAttention.apply(  # pyright: ignore[reportGeneralTypeIssues]
        q, k, v, core.schedule_of(q, k, batch, spec), pair_dropout(batch, spec)
    )
    return context


# Outside compiled graphs: a plan is new integers every microbatch, and each would compile anew.
_attend = cast(Callable[..., Tensor], torch.compiler.disable(_attend_eagerly))


def _block(entry: PlanEntry, backend: Backend, spec: AttentionSpec, deterministic: bool) -> Block:
    packed = entry.mask.kind == MaskKind.DOCUMENTS and backend.varlen
    return Block(
        entry.mask,
        entry.query_rows(packed=packed),
        entry.key_rows(packed=packed),
        backend,
        spec.scale,
        spec.softcap,
        deterministic,
    )


def _stream_kind(batch: TokenBatch, spec: AttentionSpec, window: int | None) -> MaskKind:
    """What the whole stream asks of a kernel."""
    if window is not None:
        return MaskKind.WINDOW
    if len(batch.spans) > 1:
        return MaskKind.DOCUMENTS
    return MaskKind.CAUSAL if spec.causal else MaskKind.FULL


def _equal(batch: TokenBatch) -> bool:
    """Whether all documents have one length."""
    return len({length for _, length in batch.spans}) <= 1
