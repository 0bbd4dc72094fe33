"""Attention of one chunk of queries at a time: the rows of a stream's attention, for runners that hold no more.

A row is one chunk of queries against all keys its tokens see. Keys lie in one buffer, or in blocks that pass by one
after another; either way each (row, block) part is a few launches on local tensors, decided from integers. Between
parts only `(out, lse)` of the row is carried forward, and only dq backward.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.ops.attention import LocalAttention, Schedule, add_backward, add_forward, pair_dropout
from freight.ops.attention_blocks import PairDropout
from freight.ops.attention_math import working_dtype
from freight.ops.attention_plan import AttentionPlan, Range
from freight.ops.batch import TokenBatch
from freight.ops.protocols import AttentionSpec
from freight.ops.shard_plan import build_shard_plan


@dataclass(frozen=True, eq=False)
class RowPart:
    """A row against the keys `[keys[0], keys[1])` of the stream; its schedule counts from the first of each."""

    keys: Range
    schedule: Schedule


@dataclass(frozen=True, eq=False)
class Row:
    """One chunk of queries.

    Args:
        number: Of the chunk.
        queries: Its tokens in the stream.
        keys: From the first token of the first chunk of which it sees anything, to its own last token.
        parts: By ascending keys; none for a chunk of padding.
        numbers: int64, place in the stream of each query that is here, where that is not all of them.
    """

    number: int
    queries: Range
    keys: Range
    parts: tuple[RowPart, ...]
    numbers: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RowAttention:
    """A layer's attention, row by row.

    Args:
        core: Chooses kernels.
        batch: Where documents lie.
        spec: Of the layer; causal.
        chunks: Ranges that cover the stream, ascending.
        first_head: Global number of the first query head.
        pieces: Which tokens of a chunk the queries are, where other ranks hold the rest; None = all.
    """

    core: LocalAttention
    batch: TokenBatch
    spec: AttentionSpec
    chunks: Sequence[Range]
    first_head: int = 0
    pieces: Callable[[Range], Sequence[Range]] | None = None

    def rows(self, q: Tensor, k: Tensor, *, by_block: bool) -> tuple[Row, ...]:
        """Every visible pair of the batch exactly once; made by the first layer that asks.

        Args:
            q: Any queries, for dtype, device and heads.
            k: Any keys.
            by_block: The keys of each chunk lie in a tensor of their own; otherwise those of a row lie in one.
        """
        key = ("rows", self.core.key(q, k, self.spec), tuple(self.chunks), by_block)

        def make() -> tuple[Row, ...]:
            schedules: dict[AttentionPlan, Schedule] = {}
            return tuple(self._row(q, k, number, by_block, schedules) for number in range(len(self.chunks)))

        return self.batch.cached(key, make)

    def forward(self, row: Row, q: Tensor, parts: Iterable[tuple[RowPart, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Attention of one row.

        Args:
            row: Which.
            q: `[tokens_q, heads, head_dim]`.
            parts: Its parts in any order, each with its keys and values `[tokens_k, groups, head_dim]`.

        Returns:
            out like q, and lse `[heads, tokens_q]` in float32 (float64 for float64); 0 and `-inf` at padding.
        """
        dtype = working_dtype(q.dtype)
        out = q.new_zeros(q.shape, dtype=dtype)
        lse = q.new_full((q.shape[0], q.shape[1]), float("-inf"), dtype=dtype)
        for part, k, v in parts:
            add_forward(part.schedule, q, k, v, out, lse, self._dropout(row, part))
        return out.to(q.dtype), lse.t().contiguous()

    def backward(
        self,
        row: Row,
        part: RowPart,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        gradients: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add the gradients of one part of a row.

        Args:
            row: Which.
            part: Of it.
            dout: Gradient of the row's output, like q.
            q: `[tokens_q, heads, head_dim]`.
            k: Keys of the part.
            v: Values of the part.
            out: The row's output over all parts.
            lse: `[heads, tokens_q]` over all parts.
            gradients: dq, dk and dv to add to, float32 (float64 for float64).
        """
        add_backward(part.schedule, dout, q, k, v, out, lse.t(), gradients, self._dropout(row, part))

    def _dropout(self, row: Row, part: RowPart) -> PairDropout | None:
        first = dict(first_head=self.first_head, first_query=row.queries[0], first_key=part.keys[0])
        return pair_dropout(self.batch, self.spec, **first, q_numbers=row.numbers)

    def _row(self, q: Tensor, k: Tensor, number: int, by_block: bool, schedules: dict[AttentionPlan, Schedule]) -> Row:
        """One row; equal parts share a schedule, as there are quadratically many of them."""
        starts, queries = self.batch.cu_seqlens, self.chunks[number]
        first, last = bisect_right(starts, queries[0]) - 1, bisect_left(starts, queries[1])
        segments = starts[first : last + 1], self.batch.lengths[first:last]
        oldest = self._chunk_of(_first_key(queries, *segments, self.spec.window))
        keys = self.chunks[oldest][0], queries[1]
        here = [queries] if self.pieces is None else self.pieces(queries)
        parts = []
        for block in self.chunks[oldest : number + 1] if by_block else [keys]:
            plan = self.core.plan(
                q, k, self.batch, self.spec, *segments, build=build_shard_plan, queries=here, keys=[block]
            )
            if plan.entries:
                if plan not in schedules:
                    schedules[plan] = Schedule(plan, *self.core.kernels(q, k, self.batch, self.spec, plan.entries))
                parts.append(RowPart(block, schedules[plan]))
        numbers = None
        if tuple(here) != (queries,):
            numbers = torch.cat([torch.arange(*piece) for piece in here]).to(q.device)
        return Row(number, queries, keys, tuple(parts), numbers)

    def _chunk_of(self, token: int) -> int:
        return bisect_right(self.chunks, token, key=lambda chunk: chunk[0]) - 1


def _first_key(queries: Range, starts: Sequence[int], lengths: Sequence[int], window: int | None) -> int:
    """The first token that any of the queries sees; their own first one if all are padding."""
    for start, length in zip(starts, lengths, strict=False):
        first = max(start, queries[0])
        if first < min(start + length, queries[1]):
            return start if window is None else max(start, first - window + 1)
    return queries[0]
