"""A rank's part of a microbatch: everything that belongs to a token travels with it."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import LayoutError
from freight.ops.batch import IGNORE_INDEX, TokenBatch
from freight.ops.layout import LayoutKind, SequenceLayout


def parts(batch: TokenBatch, kind: str, ranks: int = 2) -> list[TokenBatch]:
    layout = SequenceLayout(kind, batch.stream_tokens, ranks, batch.cu_seqlens)
    return [batch.local(layout, rank) for rank in range(ranks)]


def test_labels_are_shifted_before_the_split() -> None:
    """A rank's last token still knows the next one, which another rank holds; positions are those of the document."""
    ids = TokenBatch.from_documents([[1, 2, 3, 4, 5, 6, 7, 8]])
    assert [part.labels.tolist() for part in parts(ids, "contiguous")] == [[2, 3, 4, 5], [6, 7, 8, IGNORE_INDEX]]
    numbers = parts(TokenBatch.from_documents([list(range(8))]), "zigzag")
    assert [part.input_ids.tolist() for part in numbers] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [part.labels.tolist() for part in numbers] == [[1, 2, 7, IGNORE_INDEX], [3, 4, 5, 6]]
    assert [part.position_ids.tolist() for part in numbers] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert sum(int((part.labels != IGNORE_INDEX).sum()) for part in numbers) == 7


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "zigzag_document"])
def test_lengths_that_do_not_divide(kind: str) -> None:
    """A row of 11, whole or as 5 + 6, becomes 12: one padding token without label, of no document."""
    for documents in ([list(range(11))], [list(range(5)), list(range(6))]):
        both = parts(TokenBatch.from_documents(documents), kind)
        assert [part.tokens for part in both] == [6, 6]
        assert all(part.stream_tokens == 12 and part.real_tokens == 11 for part in both)
        assert sum(int(part.valid.sum()) for part in both) == 11
        (padding,) = [part.labels[~part.valid].tolist() for part in both if not part.valid.all()]
        assert padding == [IGNORE_INDEX]


@settings(max_examples=100)
@given(
    spans=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=5),
    kind=st.sampled_from(list(LayoutKind)),
    ranks=st.integers(1, 4),
)
def test_ranks_together_hold_the_stream(spans: list[tuple[int, int]], kind: LayoutKind, ranks: int) -> None:
    starts = tuple(accumulate((length + padding for length, padding in spans), initial=0))
    tokens = starts[-1]
    whole = TokenBatch(
        torch.arange(tokens),
        torch.arange(tokens) + 100,
        torch.arange(tokens) + 200,
        cu_seqlens=starts,
        lengths=tuple(length for length, _ in spans),
        documents=tuple(range(len(spans))),
        seed=7,
        step=3,
    )
    interleaved = kind == LayoutKind.INTERLEAVED
    layout = SequenceLayout(kind, tokens, ranks, starts, chunk_tokens=2 * ranks if interleaved else None)
    of_ranks = [whole.local(layout, rank) for rank in range(ranks)]
    order = torch.cat([part.token_numbers for part in of_ranks]).argsort()[:tokens]
    for name in ("input_ids", "labels", "position_ids", "valid", "document_lengths"):
        assert torch.equal(torch.cat([getattr(part, name) for part in of_ranks])[order], getattr(whole, name)), name
    for part in of_ranks:
        assert part.tokens == layout.local_tokens == len(part.input_ids)
        assert part.real_tokens == whole.real_tokens and (part.seed, part.step) == (7, 3)
        assert len(part.documents) == len(part.lengths)
        assert part.spans == whole.spans and part.max_seqlen == whole.max_seqlen
        tail = part.range(1)
        assert torch.equal(tail.token_numbers, part.token_numbers[1:]) and torch.equal(tail.valid, part.valid[1:])


def test_a_whole_stream_is_numbered_in_order() -> None:
    batch = TokenBatch.from_documents([[1, 2], [3]], pad_to=5)
    assert batch.layout is None and batch.tokens == batch.stream_tokens == 5
    assert batch.range(1, 4).token_numbers.tolist() == [1, 2, 3]


def test_parts_share_no_cache_with_the_whole() -> None:
    batch = TokenBatch.from_documents([[1, 2, 3, 4]])
    batch.cached("plan", lambda: "of the whole")
    assert parts(batch, "contiguous")[0].cached("plan", lambda: "of the part") == "of the part"


def test_a_layout_of_another_stream_is_refused() -> None:
    batch = TokenBatch.from_documents([[1, 2, 3, 4]])
    with pytest.raises(LayoutError, match="the layout is of 6 tokens; got a stream of 4"):
        batch.local(SequenceLayout("contiguous", 6, 2), 0)
    part = parts(batch, "contiguous")[0]
    with pytest.raises(LayoutError):
        part.local(SequenceLayout("contiguous", 4, 2), 0)
