"""Layouts: published integers, and inverses of random rows."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import LayoutError
from freight.ops.layout import LayoutKind, SequenceLayout


def shards(layout: SequenceLayout, values: list[int]) -> list[list[int]]:
    return [torch.tensor(values)[layout.index(rank)].tolist() for rank in range(layout.ranks)]


def test_labels_are_shifted_before_the_split() -> None:
    """Shift after the split: contiguous and zigzag integers over two ranks."""
    contiguous, zigzag = (SequenceLayout(kind, 8, 2) for kind in ("contiguous", "zigzag"))
    assert shards(contiguous, [2, 3, 4, 5, 6, 7, 8, -100]) == [[2, 3, 4, 5], [6, 7, 8, -100]]
    assert shards(zigzag, list(range(8))) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert shards(zigzag, [1, 2, 3, 4, 5, 6, 7, -100]) == [[1, 2, 7, -100], [3, 4, 5, 6]]
    assert shards(zigzag, [1, 2, 3, 4, 5, 6, 7, 8]) == [[1, 2, 7, 8], [3, 4, 5, 6]]


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "zigzag_document"])
def test_only_the_row_is_padded(kind: str) -> None:
    """Length not a multiple of 2 x ranks: a row of 11, whole or as 5 + 6, is 12."""
    for cu_seqlens in ((0, 11), (0, 5, 11)):
        layout = SequenceLayout(kind, 11, 2, cu_seqlens)
        assert layout.tokens == 12 and layout.pad == 1 and layout.local_tokens == 6


def test_interleaved_pieces() -> None:
    layout = SequenceLayout("interleaved", 10, 2, chunk_tokens=4)
    assert layout.pieces(0) == ((0, 2), (4, 6), (8, 9)) and layout.pieces(1) == ((2, 4), (6, 8), (9, 10))


def test_rows_of_ranks_take_a_share_together() -> None:
    """Two rows of two: the share of each row, early and late piece, cut in two; chunks likewise."""
    layout = SequenceLayout("zigzag", 16, 4, row=2)
    assert [layout.pieces(rank) for rank in range(4)] == [((0, 4),), ((12, 16),), ((4, 8),), ((8, 12),)]
    layout = SequenceLayout("interleaved", 24, 4, chunk_tokens=16, row=2)
    assert layout.pieces(0) == ((0, 4), (16, 18)) and layout.pieces(3) == ((8, 12), (20, 22))
    assert SequenceLayout("zigzag_document", 13, 4, (0, 5, 13), row=2).tokens == 16


def test_every_document_is_zigzag() -> None:
    """Whole multiples of 2P: each rank holds an early and the mirrored late piece of both documents."""
    layout = SequenceLayout("zigzag_document", 12, 2, (0, 4, 12))
    assert layout.pieces(0) == ((0, 1), (3, 4), (4, 6), (10, 12))
    assert layout.pieces(1) == ((1, 2), (2, 3), (6, 8), (8, 10))


@settings(max_examples=200)
@given(
    kind=st.sampled_from(list(LayoutKind)),
    spans=st.lists(st.integers(1, 25), min_size=1, max_size=6),
    ranks=st.integers(1, 6),
    row=st.none() | st.integers(1, 4),
    chunk=st.integers(1, 4),
)
def test_every_token_has_one_place(kind: LayoutKind, spans: list[int], ranks: int, row: int | None, chunk: int) -> None:
    starts = list(accumulate(spans, initial=0))
    ranks *= row or 1
    chunk_tokens = 2 * chunk * ranks if kind == LayoutKind.INTERLEAVED else None
    layout = SequenceLayout(kind, starts[-1], ranks, starts, chunk_tokens=chunk_tokens, row=row)
    assert layout.pad < layout.unit <= 2 * ranks
    inverse = layout.inverse().tolist()
    assert sorted(inverse) == list(range(layout.tokens))
    for rank in range(ranks):
        index = layout.index(rank).tolist()
        assert len(index) == layout.local_tokens and index == sorted(index)
        for place, position in enumerate(index):
            assert layout.rank_of(position) == rank
            assert inverse[position] == rank * layout.local_tokens + place
    for number in range(layout.rows):
        of_row = [
            i for rank in range(number * layout.row, (number + 1) * layout.row) for i in layout.index(rank).tolist()
        ]
        share = [i for start, stop in layout.share(number) for i in range(start, stop)]
        assert sorted(of_row) == share
        if kind != LayoutKind.INTERLEAVED:
            assert of_row == share, "a row's parts in rank order are its share"


@settings(max_examples=60)
@given(spans=st.lists(st.integers(100, 2000), min_size=1, max_size=8), ranks=st.sampled_from([2, 4, 8]))
def test_document_zigzag_balances_causal_work(spans: list[int], ranks: int) -> None:
    """Pairs of the busiest rank and of the mean differ by 3 % at most above 200 tokens per rank."""
    starts = list(accumulate([*spans, 200 * ranks], initial=0))
    layout = SequenceLayout("zigzag_document", starts[-1], ranks, starts)
    begin_of = [start for start, span in zip(starts, [*spans, 200 * ranks], strict=False) for _ in range(span)]
    work = [sum(i - begin_of[i] + 1 for i in layout.index(rank).tolist() if i < starts[-1]) for rank in range(ranks)]
    assert sum(work) / ranks / max(work) >= 0.97


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("contiguous", 8, 2, (0, 3, 3, 8)), "must start at 0, increase strictly and end at the row's 8 tokens"),
        (("contiguous", 8, 2, (0, 3)), r"got \[0, 3\]"),
        (("contiguous", 0, 2), "at least 1 token"),
        (("interleaved", 8, 2), "`chunk_tokens` belongs to interleaved layouts"),
    ],
)
def test_wrong_integers_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        SequenceLayout(*arguments)


def test_chunk_must_divide_over_ranks() -> None:
    with pytest.raises(LayoutError, match="multiple of 4 for 4 ranks; got 6"):
        SequenceLayout("interleaved", 8, 4, chunk_tokens=6)


def test_rows_must_divide_the_ranks() -> None:
    with pytest.raises(LayoutError, match="`row` must divide the 4 ranks; got 3"):
        SequenceLayout("zigzag", 8, 4, row=3)


def test_position_out_of_range() -> None:
    with pytest.raises(LayoutError, match=r"\[0, 8\); got 8"):
        SequenceLayout("zigzag", 8, 2).rank_of(8)
