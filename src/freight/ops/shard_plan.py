"""Plans where queries and keys are different parts of one stream: a rank's tokens against those of another.

Queries and keys are given as the global ranges that lie one after another in their buffers; entries come out in buffer
coordinates. What a rank holds of one document lies together in its buffer, in order. So the causal pairs of a rank with
itself are one square, and with any other rank a few rectangles, however many pieces a layout cuts documents into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from freight.errors import LayoutError
from freight.ops.attention_mask import CAUSAL, FULL, MaskKind
from freight.ops.attention_plan import AttentionPlan, Piece, Range, clip, cover, document_pairs, launches, overlap
from freight.ops.layout import SequenceLayout


class Part(NamedTuple):
    """Tokens `[start, stop)` of the stream that lie in a buffer from `place` on."""

    start: int
    stop: int
    place: int

    @property
    def range(self) -> Range:
        """In the stream."""
        return self.start, self.stop

    @property
    def places(self) -> Range:
        """In the buffer."""
        return self.place, self.place + self.stop - self.start


def build_shard_plan(
    cu_seqlens: Sequence[int],
    lengths: Sequence[int],
    *,
    queries: Sequence[Range],
    keys: Sequence[Range],
    causal: bool = True,
    window: int | None = None,
    varlen: bool = False,
    native_window: bool = False,
    max_segments: int | None = None,
) -> AttentionPlan:
    """Cover every visible pair of some queries with some keys exactly once.

    Args:
        cu_seqlens: Start of each segment of the stream, then its tokens.
        lengths: Real tokens of each segment.
        queries: Global ranges in the order of the queries' buffer; ascending, disjoint.
        keys: The same of the keys.
        causal: As in `build_plan`, and all that follow.
        window: Keys a token sees, itself included.
        varlen: The kernel takes documents of any lengths in one call.
        native_window: The kernel takes a window as it is; of use where queries and keys hold a whole document.
        max_segments: Most segments of one launch.

    Raises:
        LayoutError: A window without `causal`, or a window below 1.
    """
    if window is not None and (window < 1 or not causal):
        raise LayoutError(f"a sliding window must be at least 1 and causal; got {window} with causal {causal}.")
    documents = _documents(cu_seqlens, lengths)
    pieces: list[Piece] = []
    for document, of_queries, of_keys in zip(
        documents, document_parts(documents, queries), document_parts(documents, keys), strict=True
    ):
        if of_queries and of_keys:
            reach = window if window is not None and window < document[1] - document[0] else None
            pieces += _document_pieces(document, of_queries, of_keys, causal, reach, native_window)
    return AttentionPlan(
        launches(pieces, varlen=varlen, max_segments=max_segments),
        _tokens(queries),
        sum(_pairs(piece) for piece in pieces),
        _tokens(keys),
    )


def _documents(cu_seqlens: Sequence[int], lengths: Sequence[int]) -> list[Range]:
    """Every segment with real tokens, as its range of them."""
    return [(start, start + length) for start, length in zip(cu_seqlens, lengths, strict=False) if length]


def document_parts(documents: Sequence[Range], pieces: Sequence[Range]) -> list[list[Part]]:
    """What some pieces of a stream hold of each document; all ascending."""
    parts: list[list[Part]] = [[] for _ in documents]
    number = place = 0
    for piece in pieces:
        while number < len(documents) and documents[number][1] <= piece[0]:
            number += 1
        for later in range(number, len(documents)):
            if documents[later][0] >= piece[1]:
                break
            common = overlap(documents[later], piece)
            if common is not None:
                parts[later].append(Part(*common, place + common[0] - piece[0]))
        place += piece[1] - piece[0]
    return parts


def _document_pieces(
    document: Range, queries: list[Part], keys: list[Part], causal: bool, window: int | None, native_window: bool
) -> list[Piece]:
    """Blocks of one document, in buffer coordinates."""
    all_queries, all_keys = _joined(queries), _joined(keys)
    if not causal:
        return [Piece(all_queries, all_keys, FULL)]
    if window is None and [part.range for part in queries] == [part.range for part in keys]:
        return [Piece(all_queries, all_keys, CAUSAL)]
    whole = queries[0].range == keys[0].range == document
    return _fuse(
        Piece(_move(piece.q, query), _move(piece.k, key), piece.mask)
        for query in queries
        for covering in cover(document, query.range, causal, window, native_window and whole)
        for key in keys
        for piece in clip(covering, 0, key.range)
    )


def _joined(parts: list[Part]) -> Range:
    """Where the parts of one document lie in their buffer: together."""
    return parts[0].places[0], parts[-1].places[1]


def _move(places: Range, part: Part) -> Range:
    """Stream coordinates -> buffer coordinates."""
    return places[0] - part.start + part.place, places[1] - part.start + part.place


def _fuse(pieces: Iterator[Piece]) -> list[Piece]:
    """Rectangles over the same queries whose keys adjoin become one, then those over the same keys."""
    fused: list[Piece] = []
    rectangles: list[Piece] = []
    for piece in pieces:
        (rectangles if piece.mask.kind == MaskKind.FULL else fused).append(piece)
    wide: list[Piece] = []
    for piece in sorted(rectangles, key=lambda piece: (piece.q, piece.k)):
        if wide and wide[-1].q == piece.q and wide[-1].k[1] == piece.k[0]:
            wide[-1] = wide[-1]._replace(k=(wide[-1].k[0], piece.k[1]))
        else:
            wide.append(piece)
    tall: list[Piece] = []
    for piece in sorted(wide, key=lambda piece: (piece.k, piece.q)):
        if tall and tall[-1].k == piece.k and tall[-1].q[1] == piece.q[0]:
            tall[-1] = tall[-1]._replace(q=(tall[-1].q[0], piece.q[1]))
        else:
            tall.append(piece)
    return fused + tall


def _pairs(piece: Piece) -> int:
    """Visible pairs of a block."""
    queries, keys = piece.q[1] - piece.q[0], piece.k[1] - piece.k[0]
    if piece.mask.kind == MaskKind.FULL:
        return queries * keys
    if piece.mask.kind == MaskKind.WINDOW:
        return document_pairs(queries, window=piece.mask.window)
    return queries * (queries + 1) // 2


def _tokens(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def pairs_by_share(
    layout: SequenceLayout,
    cu_seqlens: Sequence[int],
    lengths: Sequence[int],
    *,
    causal: bool = True,
    window: int | None = None,
) -> tuple[int, ...]:
    """Visible pairs whose query each row of ranks holds (each rank, in rows of one)."""
    documents = _documents(cu_seqlens, lengths)

    def of_part(document: Range, part: Part) -> int:
        if not causal:
            return (part.stop - part.start) * (document[1] - document[0])
        before, after = part.start - document[0], part.stop - document[0]
        return document_pairs(after, window=window) - document_pairs(before, window=window)

    return tuple(
        sum(
            of_part(document, part)
            for document, parts in zip(documents, document_parts(documents, layout.share(row)), strict=True)
            for part in parts
        )
        for row in range(layout.rows)
    )


def balance(work: Sequence[int]) -> float:
    """`mean / max` of the ranks' work, in (0, 1]: the share of attention time that is not spent waiting."""
    return sum(work) / len(work) / max(work) if any(work) else 1.0


def travel(
    layout: SequenceLayout,
    cu_seqlens: Sequence[int],
    lengths: Sequence[int],
    *,
    causal: bool = True,
    window: int | None = None,
) -> tuple[int, ...]:
    """How far around a ring the keys of each row must go: row `row + travel` is the last that needs them.

    Args:
        layout: Its shares are what the ring's members hold.
        cu_seqlens: Of the stream.
        lengths: Of the stream.
        causal: Whether a token sees only what came before.
        window: Keys a token sees.
    """
    rows = layout.rows
    documents = _documents(cu_seqlens, lengths)
    shares = [document_parts(documents, layout.share(row)) for row in range(rows)]
    far = [0] * rows
    for number in range(len(documents)):
        parts = sorted((part, row) for row in range(rows) for part in shares[row][number])
        for at, (query, reader) in enumerate(parts):
            for key, owner in parts[:at] if causal else parts:
                if window is None or query.start - (key.stop - 1) < window:
                    far[owner] = max(far[owner], (reader - owner) % rows)
        if min(far) == rows - 1:
            break
    return tuple(far)
