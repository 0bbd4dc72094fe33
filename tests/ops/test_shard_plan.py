"""Plans between parts of a stream cover every visible pair once, for every layout and number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from freight.ops.attention_mask import MaskKind
from freight.ops.layout import LayoutKind, SequenceLayout
from freight.ops.shard_plan import balance, build_shard_plan, pairs_by_share, travel
from tests.ops.test_attention_plan import covered, streams, wanted


def layout_of(kind: LayoutKind, starts: list[int], ranks: int, row: int = 1) -> SequenceLayout:
    interleaved = kind == LayoutKind.INTERLEAVED
    return SequenceLayout(
        kind, starts[-1], ranks * row, starts, chunk_tokens=2 * ranks * row if interleaved else None, row=row
    )


def disjoint(ranges: list[tuple[int, int]]) -> bool:
    ordered = sorted(ranges)
    return all(a[1] <= b[0] for a, b in pairwise(ordered))


@settings(max_examples=200)
@given(
    stream=streams(),
    kind=st.sampled_from(list(LayoutKind)),
    ranks=st.integers(1, 5),
    row=st.integers(1, 2),
    window=st.none() | st.integers(1, 9),
    causal=st.booleans(),
    varlen=st.booleans(),
    native_window=st.booleans(),
    gathered=st.booleans(),
)
def test_all_pairs_of_ranks_cover_the_stream_once(
    stream: tuple[list[int], list[int]],
    kind: LayoutKind,
    ranks: int,
    row: int,
    window: int | None,
    causal: bool,
    varlen: bool,
    native_window: bool,
    gathered: bool,
) -> None:
    """Ring: rank by rank; gathered: the keys of all ranks, put in order."""
    starts, lengths = stream
    window = window if causal else None
    layout = layout_of(kind, starts, ranks, row)
    pairs: Counter[tuple[int, int]] = Counter()
    by_share = pairs_by_share(layout, starts, lengths, causal=causal, window=window)
    for reader in range(ranks):
        queries = layout.share(reader)
        of_reader = 0
        for keys in [((0, layout.tokens),)] if gathered else [layout.share(owner) for owner in range(ranks)]:
            plan = build_shard_plan(
                starts,
                lengths,
                queries=queries,
                keys=keys,
                causal=causal,
                window=window,
                varlen=varlen,
                native_window=native_window,
            )
            q_global = [i for start, stop in queries for i in range(start, stop)]
            k_global = [i for start, stop in keys for i in range(start, stop)]
            found = covered(plan)
            assert plan.pairs == sum(found.values())
            assert (plan.tokens, plan.key_tokens) == (len(q_global), len(k_global))
            pairs.update({(q_global[q], k_global[k]): n for (q, k), n in found.items()})
            of_reader += plan.pairs
            for entry in plan.entries:
                assert disjoint([q for q, _ in entry.segments()]), "results of one launch need no merging"
                for (a, b), (c, d) in entry.segments():
                    kinds = {entry.mask.kind, entry.mask.shape.kind}
                    assert kinds & {MaskKind.FULL, MaskKind.WINDOW} or b - a == d - c, "triangles are square"
        assert of_reader == by_share[reader]
    assert set(pairs) == wanted(starts, lengths, causal, window)
    assert set(pairs.values()) <= {1}


@settings(max_examples=100)
@given(
    stream=streams(),
    kind=st.sampled_from([LayoutKind.CONTIGUOUS, LayoutKind.ZIGZAG, LayoutKind.ZIGZAG_DOCUMENT]),
    ranks=st.integers(1, 5),
    window=st.none() | st.integers(1, 9),
    causal=st.booleans(),
)
def test_keys_travel_as_far_as_somebody_needs_them(
    stream: tuple[list[int], list[int]], kind: LayoutKind, ranks: int, window: int | None, causal: bool
) -> None:
    starts, lengths = stream
    window = window if causal else None
    layout = layout_of(kind, starts, ranks)
    far = travel(layout, starts, lengths, causal=causal, window=window)
    for owner in range(ranks):
        needed = [
            distance
            for distance in range(1, ranks)
            if build_shard_plan(
                starts,
                lengths,
                queries=layout.share((owner + distance) % ranks),
                keys=layout.share(owner),
                causal=causal,
                window=window,
            ).entries
        ]
        assert far[owner] == max(needed, default=0)


def test_zigzag_takes_one_launch_per_rank() -> None:
    """A rank with itself: one square; with an earlier one: all queries, first half of the keys; with a later one:
    second half of the queries, all keys."""
    layout = SequenceLayout("zigzag", 48, 4)
    plans = [
        build_shard_plan([0, 48], [48], queries=layout.share(1), keys=layout.share(owner)).entries for owner in range(4)
    ]
    assert [len(entries) for entries in plans] == [1, 1, 1, 1]
    places = [(e.mask.kind, e.q_start, e.q_stop, e.k_start, e.k_stop) for (e,) in plans]
    assert places == [("full", 0, 12, 0, 6), ("causal", 0, 12, 0, 12), ("full", 6, 12, 0, 12), ("full", 6, 12, 0, 12)]


def test_equal_documents_share_launches() -> None:
    starts = list(range(0, 64, 16))
    layout = SequenceLayout("zigzag_document", 48, 4, starts)
    for owner in range(4):
        plan = build_shard_plan(starts, [16] * 3, queries=layout.share(1), keys=layout.share(owner))
        assert plan.launches == 1


def test_gathered_keys_need_no_more_launches_than_local_ones() -> None:
    plan = build_shard_plan([0, 48], [48], queries=[(12, 24)], keys=[(0, 48)])
    assert [(e.mask.kind, e.k_start, e.k_stop) for e in plan.entries] == [("causal", 12, 24), ("full", 0, 12)]


def test_short_windows_and_documents_need_few_hops() -> None:
    contiguous = SequenceLayout("contiguous", 32, 4)
    assert travel(contiguous, [0, 32], [32], window=9) == (1, 1, 1, 0)
    assert travel(contiguous, [0, 32], [32], window=10) == (2, 2, 1, 0)
    assert travel(contiguous, [0, 8, 16, 24, 32], [8] * 4) == (0, 0, 0, 0)
    assert travel(contiguous, [0, 32], [32]) == (3, 2, 1, 0)
    assert travel(SequenceLayout("zigzag", 32, 4), [0, 32], [32]) == (3, 3, 3, 3)


def test_balance_of_published_rows() -> None:
    """Contiguous: P / (2P - 1); zigzag: 1; zigzag of the row over packed documents: 2/3; per document: 1."""

    def of(kind: str, lengths: list[int]) -> float:
        starts = list(accumulate(lengths, initial=0))
        return balance(pairs_by_share(SequenceLayout(kind, starts[-1], 4, starts), starts, lengths))

    assert round(of("contiguous", [65536]), 3) == 0.571
    assert of("zigzag", [65536]) == 1.0
    packed = [4096, 2048, 1024, 512, 256, 128, 64, 64]
    assert round(of("zigzag", packed), 3) == 0.667
    assert of("zigzag_document", packed) == 1.0
    assert balance([0, 0]) == 1.0
