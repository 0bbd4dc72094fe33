"""Which (query range, key range) blocks one microbatch needs, decided from integers before any tensor is touched.

Pairs in different documents are never emitted, which is all that packing is; padding belongs to no document and is in
no entry. Kernels without windows get a window as triangles and rectangles that cover it exactly. Equal blocks share
one launch, because 32 launches of 64 tokens cost more than one of 32 x 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from freight.errors import LayoutError
from freight.ops.attention_mask import ANTICAUSAL, CAUSAL, FULL, Mask, MaskKind, Rows, Segment, block_rows

Range = tuple[int, int]

# A launch costs about as much as attention of 512 tokens over a gathered copy; longer blocks run where they lie.
GATHER_TOKENS = 512
# Pairs that filling up one causal block may waste, at most, to save its launch; and the share of its length.
FILL_PAIRS = 256
FILL_SHARE = 8


@dataclass(frozen=True)
class PlanEntry:
    """One launch: queries `[q_start, q_stop)` against keys `[k_start, k_stop)` of a KV block, in buffer coordinates."""

    q_start: int
    q_stop: int
    kv_block: int
    k_start: int
    k_stop: int
    mask: Mask

    def query_rows(self, *, packed: bool = False) -> Rows:
        """Where the queries lie in the stream."""
        return block_rows(self.mask, self.q_stop - self.q_start, keys=False, base=self.q_start, packed=packed)

    def key_rows(self, *, packed: bool = False) -> Rows:
        """Where the keys lie in the stream."""
        return block_rows(self.mask, self.k_stop - self.k_start, keys=True, base=self.k_start, packed=packed)

    def segments(self) -> Iterator[tuple[Range, Range]]:
        """Query and key range of every segment, in buffer coordinates."""
        if not self.mask.segments:
            yield (self.q_start, self.q_stop), (self.k_start, self.k_stop)
        for a, b, c, d in self.mask.segments:
            yield (self.q_start + a, self.q_start + b), (self.k_start + c, self.k_start + d)


@dataclass(frozen=True)
class AttentionPlan:
    """All launches of one microbatch.

    Args:
        entries: In the order in which they run.
        tokens: Length of the stream; of the queries, where keys are other tokens.
        pairs: Visible (query, key) pairs; flops are `4 * pairs * heads * head_dim` forward, 10 backward.
        key_tokens: Length of the stream of keys; None = `tokens`.
    """

    entries: tuple[PlanEntry, ...]
    tokens: int
    pairs: int
    key_tokens: int | None = None

    @property
    def launches(self) -> int:
        """Kernel calls of one direction."""
        return len(self.entries)

    @cached_property
    def queries_once(self) -> bool:
        """Whether no query is in two entries, so that nothing needs merging."""
        return _disjoint([q for entry in self.entries for q, _ in entry.segments()])

    @cached_property
    def keys_once(self) -> bool:
        """Whether no key is in two entries, so that no gradients need adding."""
        return _disjoint([k for entry in self.entries for _, k in entry.segments()])

    @cached_property
    def idle_queries(self) -> tuple[Range, ...]:
        """Token ranges in no entry's queries: padding."""
        return _gaps([q for entry in self.entries for q, _ in entry.segments()], self.tokens)

    @cached_property
    def idle_keys(self) -> tuple[Range, ...]:
        """Token ranges in no entry's keys."""
        tokens = self.tokens if self.key_tokens is None else self.key_tokens
        return _gaps([k for entry in self.entries for _, k in entry.segments()], tokens)

    @cached_property
    def kv_blocks_needed(self) -> dict[Range, tuple[int, ...]]:
        """KV blocks that each query range of the plan reads."""
        needed: dict[Range, set[int]] = {}
        for entry in self.entries:
            for q, _ in entry.segments():
                needed.setdefault(q, set()).add(entry.kv_block)
        return {q: tuple(sorted(blocks)) for q, blocks in needed.items()}


class Piece(NamedTuple):
    """One (query range, key range) block, not yet put into a launch with others like it."""

    q: Range
    k: Range
    mask: Mask
    kv_block: int = 0


def build_plan(
    cu_seqlens: Sequence[int],
    lengths: Sequence[int],
    *,
    causal: bool = True,
    window: int | None = None,
    q_blocks: Sequence[Range] | None = None,
    kv_blocks: Sequence[Range] | None = None,
    varlen: bool = False,
    native_window: bool = False,
    max_segments: int | None = None,
) -> AttentionPlan:
    """Cover every visible pair of a stream of documents exactly once.

    Args:
        cu_seqlens: Start of each segment of the stream, then its tokens.
        lengths: Real tokens of each segment.
        causal: Whether a token sees only itself and what came before in its document.
        window: Keys a token sees, itself included; needs `causal`.
        q_blocks: Query ranges that are computed separately; default one.
        kv_blocks: Key ranges that lie in separate blocks; default one.
        varlen: The kernel takes documents of any lengths in one call.
        native_window: The kernel takes a sliding window as it is.
        max_segments: Most segments of one launch.

    Raises:
        LayoutError: A window without `causal`, or a window below 1.
    """
    if window is not None and (window < 1 or not causal):
        raise LayoutError(f"a sliding window must be at least 1 and causal; got {window} with causal {causal}.")
    tokens = cu_seqlens[-1]
    whole = [(0, tokens)]
    native_window = native_window and q_blocks is None and kv_blocks is None
    pieces: list[Piece] = []
    pairs = 0
    for start, length in zip(cu_seqlens, lengths, strict=False):
        document = (start, start + length)
        pairs += document_pairs(length, causal=causal, window=window)
        for block in q_blocks or whole:
            queries = overlap(document, block)
            if queries is None:
                continue
            for piece in cover(document, queries, causal, window, native_window):
                for number, keys in enumerate(kv_blocks or whole):
                    pieces += clip(piece, number, keys)
    return AttentionPlan(launches(pieces, varlen=varlen, max_segments=max_segments), tokens, pairs)


def launches(pieces: list[Piece], *, varlen: bool = False, max_segments: int | None = None) -> tuple[PlanEntry, ...]:
    """Blocks of one kind share launches; arguments as in `build_plan`."""
    return tuple(_one_launch_each(pieces, max_segments) if varlen else _batch(pieces, max_segments))


def document_pairs(length: int, *, causal: bool = True, window: int | None = None) -> int:
    """Visible pairs of one document: `n (n + 1) / 2`, or `W (W + 1) / 2 + (n - W) W`, or `n^2`."""
    if not causal:
        return length * length
    reach = length if window is None else min(window, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def cover(document: Range, queries: Range, causal: bool, window: int | None, native_window: bool) -> Iterator[Piece]:
    """Pieces that show queries `[a, b)` what they see of their document."""
    (start, stop), (a, b) = document, queries
    if not causal:
        yield Piece(queries, document, FULL)
        return
    if window is None or window >= stop - start:
        yield from _triangle(start, a, b)
        return
    if native_window:
        first = max(start, a - window + 1)
        yield Piece(queries, (first, b), Mask(MaskKind.WINDOW, window=window, offset=a - first))
        return
    head = min(b, start + window)  # these queries see all of their document up to themselves
    if a < head:
        yield from _triangle(start, a, head)
    step = max(window - 1, 1)
    for left in range(max(a, head), b, step):
        right = min(left + step, b)
        if window > 1:
            yield Piece((left, right), (left - window + 1, right - window + 1), ANTICAUSAL)
        if right - window + 1 < left:
            yield Piece((left, right), (right - window + 1, left), FULL)
        yield Piece((left, right), (left, right), CAUSAL)


def _triangle(start: int, a: int, b: int) -> Iterator[Piece]:
    """Queries `[a, b)` of a document that begins at `start`, causal: one square, and all that lies before it."""
    yield Piece((a, b), (a, b), CAUSAL)
    if start < a:
        yield Piece((a, b), (start, a), FULL)


def clip(piece: Piece, number: int, keys: Range) -> list[Piece]:
    """The part of a piece whose keys lie in one KV block: a smaller triangle and a rectangle at most."""
    common = overlap(piece.k, keys)
    if common is None:
        return []
    if common == piece.k:
        return [piece._replace(kv_block=number)]
    if piece.mask.kind == MaskKind.FULL:
        return [Piece(piece.q, common, FULL, number)]
    (a, b), (c, d) = piece.q, common
    shift = a - piece.k[0]
    square = (c + shift, d + shift)
    rest = (d + shift, b) if piece.mask.kind == MaskKind.CAUSAL else (a, c + shift)
    clipped = [Piece(square, common, piece.mask, number)]
    if rest[0] < rest[1]:
        clipped.append(Piece(rest, common, FULL, number))
    return clipped


def _batch(pieces: list[Piece], max_segments: int | None) -> Iterator[PlanEntry]:
    """Equal pieces, and causal ones of nearly equal length, become one launch."""
    groups: dict[tuple[int, Mask, int, int], list[Piece]] = {}
    for piece in pieces:
        key = (piece.kv_block, piece.mask, piece.q[1] - piece.q[0], piece.k[1] - piece.k[0])
        groups.setdefault(key, []).append(piece)
    for group in _fill(list(groups.values())):
        longest = max(piece.q[1] - piece.q[0] for piece in group)
        entry = _entry(group)
        is_view = entry.query_rows().stride is not None and entry.key_rows().stride is not None
        if not is_view and longest > GATHER_TOKENS:
            yield from (_entry([piece]) for piece in group)
        else:
            yield from _split(group, max_segments)


def _fill(groups: list[list[Piece]]) -> list[list[Piece]]:
    """Join groups of causal squares whose lengths are so close that filling up costs less than a launch."""
    others = [group for group in groups if group[0].mask.kind != MaskKind.CAUSAL]
    squares = [group for group in groups if group[0].mask.kind == MaskKind.CAUSAL]
    squares.sort(key=lambda group: (group[0].kv_block, group[0].q[0] - group[0].q[1]))
    joined: list[list[Piece]] = []
    for group in squares:
        longest, length = (g[0].q[1] - g[0].q[0] for g in (joined[-1] if joined else group, group))
        waste = (longest * (longest + 1) - length * (length + 1)) // 2
        close = waste <= FILL_PAIRS and FILL_SHARE * (longest - length) <= longest
        if joined and close and longest <= GATHER_TOKENS and joined[-1][0].kv_block == group[0].kv_block:
            joined[-1] += group
        else:
            joined.append(group)
    return joined + others


def _one_launch_each(pieces: list[Piece], max_segments: int | None) -> Iterator[PlanEntry]:
    """Pieces of one kind, whatever their lengths, become one launch; for kernels that take borders."""
    groups: dict[tuple[int, Mask], list[Piece]] = {}
    for piece in pieces:
        mask = Mask(MaskKind.WINDOW, window=piece.mask.window) if piece.mask.kind == MaskKind.WINDOW else piece.mask
        groups.setdefault((piece.kv_block, mask), []).append(piece)
    for group in groups.values():
        yield from _split(group, max_segments)


def _split(group: list[Piece], max_segments: int | None) -> Iterator[PlanEntry]:
    """A launch; several where pieces share queries, whose results must be merged, and where it would be too large."""
    lanes: list[list[Piece]] = []
    for piece in sorted(group, key=lambda piece: (piece.q, piece.k)):
        lane = next((lane for lane in lanes if lane[-1].q[1] <= piece.q[0]), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(piece)
    for lane in lanes:
        size = max_segments or len(lane)
        yield from (_entry(lane[i : i + size]) for i in range(0, len(lane), size))


def _entry(group: list[Piece]) -> PlanEntry:
    """One launch of like pieces."""
    group = sorted(group, key=lambda piece: piece.q)
    q_start, q_stop = group[0].q[0], max(piece.q[1] for piece in group)
    k_start, k_stop = min(piece.k[0] for piece in group), max(piece.k[1] for piece in group)
    mask, number = group[0].mask, group[0].kv_block
    if len(group) > 1:
        segments = tuple(Segment(p.q[0] - q_start, p.q[1] - q_start, p.k[0] - k_start, p.k[1] - k_start) for p in group)
        mask = Mask(MaskKind.DOCUMENTS, inner=mask.kind, window=mask.window, offset=mask.offset, segments=segments)
    return PlanEntry(q_start, q_stop, number, k_start, k_stop, mask)


def overlap(a: Range, b: Range) -> Range | None:
    """What two ranges have in common; None if nothing."""
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


def _disjoint(ranges: list[Range]) -> bool:
    ordered = sorted(ranges)
    return all(a[1] <= b[0] for a, b in pairwise(ordered))


def _gaps(ranges: list[Range], tokens: int) -> tuple[Range, ...]:
    """What `[0, tokens)` has beyond the union of the ranges."""
    gaps, reached = [], 0
    for start, stop in sorted(ranges):
        if start > reached:
            gaps.append((reached, start))
        reached = max(reached, stop)
    return (*gaps, (reached, tokens)) if reached < tokens else tuple(gaps)
