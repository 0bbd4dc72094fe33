"""Rows and their parts cover exactly what the whole stream's attention covers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.ops.attention import LocalAttention
from freight.ops.attention_rows import Row, RowAttention
from freight.ops.batch import TokenBatch
from freight.ops.protocols import AttentionSpec

Pair = tuple[int, int]


def visible(batch: TokenBatch, window: int | None) -> set[Pair]:
    pairs = set()
    for start, length in batch.spans:
        for q in range(start, start + length):
            first = start if window is None else max(start, q - window + 1)
            pairs |= {(q, k) for k in range(first, q + 1)}
    return pairs


def covered(rows: tuple[Row, ...]) -> list[Pair]:
    pairs = []
    for row in rows:
        for part in row.parts:
            assert row.keys[0] <= part.keys[0] and part.keys[1] <= row.keys[1]
            for entry in part.schedule.plan.entries:
                for (q_start, q_stop), (k_start, k_stop) in entry.segments():
                    pairs += [
                        (row.queries[0] + q, part.keys[0] + k)
                        for q in range(q_start, q_stop)
                        for k in range(k_start, k_stop)
                        if entry.mask.shape.visible(q - q_start, k - k_start)
                    ]
    return pairs


@settings(max_examples=120)
@given(
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=4),
    padding=st.integers(0, 9),
    chunk=st.integers(1, 20),
    window=st.one_of(st.none(), st.integers(1, 12)),
    by_block=st.booleans(),
)
def test_every_pair_once(lengths: list[int], padding: int, chunk: int, window: int | None, by_block: bool) -> None:
    total = sum(lengths) + padding
    batch = TokenBatch.from_documents([[1] * n for n in lengths], pad_to=total)
    chunks = [(start, min(start + chunk, total)) for start in range(0, total, chunk)]
    attention = RowAttention(LocalAttention(), batch, AttentionSpec(1.0, window=window), chunks)
    q = torch.zeros(1, 2, 4)
    rows = attention.rows(q, q, by_block=by_block)
    pairs = covered(rows)
    assert len(pairs) == len(set(pairs)) and set(pairs) == visible(batch, window)
    starts = {start for start, _ in chunks}
    seen_from = batch.tokens
    for row in reversed(rows):
        assert row.keys[0] in starts and row.keys[1] == row.queries[1]
        assert row.keys[0] <= seen_from  # no later row looks further back
        seen_from = row.keys[0]
        oldest = min((k for q, k in pairs if row.queries[0] <= q < row.queries[1]), default=row.queries[0])
        assert row.keys[0] <= oldest < row.keys[0] + chunk


def test_equal_parts_share_a_schedule() -> None:
    """There are as many parts as pairs of chunks: of a long document all but the squares are alike."""
    batch = TokenBatch.from_documents([[1] * 120])
    chunks = [(start, start + 10) for start in range(0, 120, 10)]
    q = torch.zeros(1, 2, 4)
    rows = RowAttention(LocalAttention(), batch, AttentionSpec(1.0), chunks).rows(q, q, by_block=True)
    schedules = [part.schedule for row in rows for part in row.parts]
    assert len(schedules) == 12 * 13 // 2 and len({id(schedule) for schedule in schedules}) == 2
