"""Two pictures of context parallelism: who holds which tokens, and what each rank of a ring computes at each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from freight.bench.svg import Picture
from freight.ops.attention_plan import PlanEntry
from freight.ops.layout import LayoutKind, SequenceLayout
from freight.ops.shard_plan import balance, build_shard_plan, pairs_by_share

RANKS = 4
DOCUMENTS = (32, 16, 8, 8)
CHUNK = 16
RING_TOKENS = 16
LAYOUTS = {
    LayoutKind.CONTIGUOUS: "contiguous: Ulysses; windows that fit into a rank",
    LayoutKind.ZIGZAG: "zigzag over the row: even only for one document",
    LayoutKind.ZIGZAG_DOCUMENT: "zigzag in every document: ring, all-gather, hybrid",
    LayoutKind.INTERLEAVED: f"interleaved in chunks of {CHUNK}: streamed runs",
}


def draw_layouts(path: Path) -> None:
    """A row of four documents dealt out to four ranks in every way there is."""
    tokens, starts = sum(DOCUMENTS), _starts(DOCUMENTS)
    cell, left, top, step = 9.5, 16, 66, 58
    picture = Picture(round(left * 2 + tokens * cell), 318, "Which rank holds which tokens of a packed row")
    picture.words(left, 26, f"One row: documents of {', '.join(map(str, DOCUMENTS))} tokens", kind="strong", size=14)
    picture.legend(left, 48, [(rank, f"rank {rank}") for rank in range(RANKS)])
    for number, (kind, words) in enumerate(LAYOUTS.items()):
        y = top + number * step
        layout = SequenceLayout(kind, tokens, RANKS, starts, chunk_tokens=CHUNK if kind == "interleaved" else None)
        picture.words(left, y + 12, words)
        picture.words(left + tokens * cell, y + 12, f"balance of attention {_balance(layout):.2f}", anchor="end")
        for position in range(tokens):
            rank = layout.rank_of(position)
            picture.box(left + position * cell, y + 20, cell - 1, 20, rank, note=f"token {position}: rank {rank}")
        for start in starts:
            picture.line(left + start * cell - 0.5, y + 16, left + start * cell - 0.5, y + 44)
    note = "Lines: where documents begin. Balance: mean over ranks of visible pairs, divided by the largest."
    picture.words(left, top + len(LAYOUTS) * step + 8, note, kind="quiet", size=11)
    picture.write(path)


def draw_ring(path: Path) -> None:
    """For every rank, the pairs it computes, by the step at which the keys are there."""
    layout = SequenceLayout(LayoutKind.ZIGZAG_DOCUMENT, RING_TOKENS, RANKS)
    cell, left, top, gap = 11, 16, 92, 28
    side = RING_TOKENS * cell
    width = 2 * left + RANKS * side + (RANKS - 1) * gap
    picture = Picture(width, top + side + 92, "Which pairs each rank of a ring computes at each step")
    picture.words(left, 26, f"Ring of {RANKS} ranks, one document of {RING_TOKENS} tokens", kind="strong", size=14)
    picture.legend(left, 48, [(step, f"step {step}") for step in range(RANKS)])
    for rank in range(RANKS):
        x = left + rank * (side + gap)
        picture.words(x, top - 22, f"rank {rank}", kind="strong")
        held = ", ".join(f"{a} to {b - 1}" for a, b in layout.share(rank))
        picture.words(x, top - 7, f"holds tokens {held}", kind="quiet", size=11)
        picture.box(x, top, side, side, None)
        counts = []
        for step in range(RANKS):
            pairs = list(ring_pairs(layout, rank, step))
            counts.append(f"step {step}: keys of rank {(rank - step) % RANKS}, {len(pairs)} pairs")
            for query, key in pairs:
                note = f"query {query}, key {key}: {counts[-1]}"
                picture.box(x + key * cell, top + query * cell, cell - 1, cell - 1, step, note=note)
        for number, text in enumerate(counts):
            picture.words(x, top + side + 18 + 15 * number, text, kind="quiet", size=11)
    picture.words(left, top + side + 84, "Down: queries. Across: keys. Every pair once.", kind="quiet", size=11)
    picture.write(path)


def ring_pairs(layout: SequenceLayout, rank: int, step: int) -> Iterator[tuple[int, int]]:
    """`(query, key)` in the stream of every pair that a rank computes at a step, from the plan it runs."""
    queries, keys = layout.share(rank), layout.share((rank - step) % layout.rows)
    plan = build_shard_plan((0, layout.tokens), (layout.tokens,), queries=queries, keys=keys)
    of_queries, of_keys = ([token for piece in share for token in range(*piece)] for share in (queries, keys))
    for entry in plan.entries:
        for query, key in _pairs(entry):
            yield of_queries[query], of_keys[key]


def _pairs(entry: PlanEntry) -> Iterator[tuple[int, int]]:
    """What a block sees, in buffer coordinates."""
    for query in range(entry.q_start, entry.q_stop):
        for key in range(entry.k_start, entry.k_stop):
            if entry.mask.visible(query - entry.q_start, key - entry.k_start):
                yield query, key


def _balance(layout: SequenceLayout) -> float:
    """Of attention; ranks that exchange heads do equal parts of it, whatever tokens they hold."""
    if layout.kind in (LayoutKind.CONTIGUOUS, LayoutKind.ZIGZAG, LayoutKind.ZIGZAG_DOCUMENT):
        return balance(pairs_by_share(layout, _starts(DOCUMENTS), DOCUMENTS))
    return 1.0


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return tuple(starts)
