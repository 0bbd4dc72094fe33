"""Plans cover every visible pair once and no other."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import LayoutError
from freight.ops.attention_mask import MaskKind
from freight.ops.attention_plan import AttentionPlan, build_plan, document_pairs


def covered(plan: AttentionPlan) -> Counter[tuple[int, int]]:
    """How often each (query, key) pair is computed, in buffer coordinates."""
    pairs: Counter[tuple[int, int]] = Counter()
    for entry in plan.entries:
        shape = entry.mask.shape
        for (a, b), (c, d) in entry.segments():
            pairs.update((q, k) for q in range(a, b) for k in range(c, d) if shape.visible(q - a, k - c))
    return pairs


def wanted(starts: list[int], lengths: list[int], causal: bool, window: int | None) -> set[tuple[int, int]]:
    return {
        (start + q, start + k)
        for start, length in zip(starts, lengths, strict=False)
        for q in range(length)
        for k in range(length)
        if not causal or (k <= q and (window is None or q - k < window))
    }


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """`cu_seqlens` and lengths, with padding inside and after."""
    spans = draw(st.lists(st.integers(1, 14), min_size=1, max_size=7))
    lengths = [draw(st.integers(0, span)) if draw(st.booleans()) else span for span in spans]
    return list(accumulate(spans, initial=0)), lengths


def blocks(tokens: int, chunk: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, tokens, chunk), tokens]))


@settings(max_examples=150)
@given(
    stream=streams(),
    window=st.none() | st.integers(1, 9),
    causal=st.booleans(),
    q_chunk=st.none() | st.integers(1, 12),
    kv_chunk=st.none() | st.integers(1, 12),
    varlen=st.booleans(),
    native_window=st.booleans(),
)
def test_plan_covers_exactly_the_visible_pairs(
    stream: tuple[list[int], list[int]],
    window: int | None,
    causal: bool,
    q_chunk: int | None,
    kv_chunk: int | None,
    varlen: bool,
    native_window: bool,
) -> None:
    starts, lengths = stream
    window = window if causal else None
    tokens = starts[-1]
    plan = build_plan(
        starts,
        lengths,
        causal=causal,
        window=window,
        q_blocks=q_chunk and blocks(tokens, q_chunk),
        kv_blocks=kv_chunk and blocks(tokens, kv_chunk),
        varlen=varlen,
        native_window=native_window,
    )
    pairs = covered(plan)
    assert set(pairs) == wanted(starts, lengths, causal, window)
    assert set(pairs.values()) <= {1}
    assert plan.pairs == len(pairs)
    for entry in plan.entries:
        kinds = {entry.mask.kind, entry.mask.shape.kind}
        queries = sorted(q for q, _ in entry.segments())
        assert all(a[1] <= b[0] for a, b in pairwise(queries)), "results of one launch need no merging"
        for (a, b), (c, d) in entry.segments():
            assert a < b and c < d
            assert kinds & {MaskKind.FULL, MaskKind.WINDOW} or b - a == d - c, "triangles are square"
            if kv_chunk:
                start, stop = blocks(tokens, kv_chunk)[entry.kv_block]
                assert start <= c < d <= stop
    real = {start + i for start, length in zip(starts, lengths, strict=False) for i in range(length)}
    idle = {i for start, stop in plan.idle_queries for i in range(start, stop)}
    assert idle == set(range(tokens)) - real
    queries = Counter(q for entry in plan.entries for (a, b), _ in entry.segments() for q in range(a, b))
    keys = Counter(k for entry in plan.entries for _, (c, d) in entry.segments() for k in range(c, d))
    assert plan.queries_once == (set(queries.values()) <= {1})
    assert plan.keys_once == (set(keys.values()) <= {1})


def test_one_document_is_one_launch() -> None:
    assert build_plan([0, 9], [9]).launches == 1


def test_resident_keys_are_one_rectangle() -> None:
    """A chunk of queries takes two launches, however many tokens came before."""
    plan = build_plan([0, 12], [12], q_blocks=[(8, 12)])
    assert [(e.mask.kind, e.k_start, e.k_stop) for e in plan.entries] == [("causal", 8, 12), ("full", 0, 8)]


def test_equal_documents_share_a_launch() -> None:
    assert build_plan([0, 8, 16, 24], [8, 8, 8]).launches == 1


def test_nearly_equal_documents_share_a_launch() -> None:
    plan = build_plan([0, 40, 79, 84], [40, 39, 5])
    assert plan.launches == 2
    assert plan.entries[0].query_rows().width == 40


def test_long_scattered_documents_run_where_they_lie() -> None:
    assert build_plan([0, 600, 610, 1210, 1240, 1840], [600, 10, 600, 30, 600]).launches == 5


def test_window_beyond_the_document_is_plain_causal() -> None:
    assert build_plan([0, 5], [5], window=5).entries == build_plan([0, 5], [5]).entries


def test_window_of_a_long_document_takes_few_launches() -> None:
    """Equal tiles share a launch, so the number does not grow with the document."""
    assert build_plan([0, 800], [800], window=3).launches == 6


def test_blocks_that_no_query_sees_are_left_out() -> None:
    plan = build_plan([0, 16], [16], window=4, q_blocks=[(12, 16)], kv_blocks=blocks(16, 4))
    assert {entry.kv_block for entry in plan.entries} == {2, 3}
    assert {block for needed in plan.kv_blocks_needed.values() for block in needed} == {2, 3}


def test_varlen_kernels_get_one_launch() -> None:
    plan = build_plan([0, 5, 8, 20], [5, 3, 10], varlen=True)
    assert plan.launches == 1 and plan.entries[0].mask.kind == MaskKind.DOCUMENTS
    assert build_plan([0, 5, 8, 20], [5, 3, 10], window=4, varlen=True, native_window=True).launches <= 2


def test_too_many_segments_are_split() -> None:
    """A CUDA grid has a largest size."""
    starts = list(range(0, 22, 2))
    for varlen in (True, False):
        assert build_plan(starts, [2] * 10, varlen=varlen, max_segments=4).launches == 3


def test_pairs() -> None:
    assert document_pairs(5) == 15 and document_pairs(5, causal=False) == 25
    assert document_pairs(5, window=3) == 1 + 2 + 3 + 3 + 3
    assert document_pairs(2, window=3) == 3 and document_pairs(0) == 0


@pytest.mark.parametrize(("window", "causal"), [(0, True), (-1, True), (3, False)])
def test_impossible_windows_are_refused(window: int, causal: bool) -> None:
    with pytest.raises(LayoutError, match="at least 1 and causal"):
        build_plan([0, 4], [4], causal=causal, window=window)
