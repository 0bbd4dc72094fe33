"""Which tokens of a row each rank holds, in closed form and with its inverse.

Everything that travels with tokens (ids, shifted labels, positions) is indexed with the same `index(rank)`, so a layout
is data and not code. Padding is added to the row's end only, as few tokens as the layout needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from freight.errors import LayoutError

Range = tuple[int, int]


class LayoutKind(StrEnum):
    """How a row is dealt out to P ranks.

    `contiguous`: rank r holds the r-th of P equal pieces. `zigzag`: of 2P equal pieces, rank r holds r and 2P-1-r,
    which gives every rank the same causal work. `zigzag_document`: the same inside every document. `interleaved`:
    rank r holds the r-th of P pieces of every chunk.

    Ranks may come in rows of `row` that take one share together: the share is dealt out as above to `P / row` rows,
    and cut into equal parts, in order, for the ranks of a row. Putting a row's parts one after another gives the share
    back. Chunks of an interleaved layout are then zigzag over rows.
    """

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    ZIGZAG_DOCUMENT = "zigzag_document"
    INTERLEAVED = "interleaved"


class SequenceLayout:
    """A row of tokens over ranks.

    Args:
        kind: How it is dealt out.
        tokens: Tokens of the row, at least 1.
        ranks: Number of ranks P.
        cu_seqlens: Start of every segment, then `tokens`; used by `zigzag_document`; one segment by default.
        chunk_tokens: Tokens of a chunk, for `interleaved`; a multiple of P.
        row: Ranks that take one share together; divides P. 1 by default, P for `interleaved`.

    Raises:
        LayoutError: The integers contradict each other.
    """

    def __init__(
        self,
        kind: LayoutKind | str,
        tokens: int,
        ranks: int,
        cu_seqlens: Sequence[int] | None = None,
        *,
        chunk_tokens: int | None = None,
        row: int | None = None,
    ) -> None:
        self.kind = LayoutKind(kind)
        self.ranks = ranks
        self.row = row or (ranks if self.kind == LayoutKind.INTERLEAVED else 1)
        if tokens < 1 or ranks < 1:
            raise LayoutError(f"a layout needs at least 1 token and 1 rank; got {tokens} and {ranks}.")
        if self.row < 1 or ranks % self.row:
            raise LayoutError(f"`row` must divide the {ranks} ranks; got {row}.")
        if (chunk_tokens is not None) != (self.kind == LayoutKind.INTERLEAVED):
            raise LayoutError(f"`chunk_tokens` belongs to interleaved layouts; got {chunk_tokens} for {self.kind}.")
        unit = self.unit
        if chunk_tokens is not None and (chunk_tokens < 1 or chunk_tokens % unit):
            raise LayoutError(f"`chunk_tokens` must be a multiple of {unit} for {ranks} ranks; got {chunk_tokens}.")
        starts = tuple(cu_seqlens or (0, tokens))
        if starts[0] != 0 or starts[-1] != tokens or any(b <= a for a, b in pairwise(starts)):
            raise LayoutError(
                f"`cu_seqlens` must start at 0, increase strictly and end at the row's {tokens} tokens; "
                f"got {[*starts]}."
            )
        self.pad = -tokens % unit
        self.tokens = tokens + self.pad
        self.chunk_tokens = chunk_tokens
        # Padding is dealt out like one more document.
        self._borders = (*starts, self.tokens) if self.pad else starts

    @property
    def rows(self) -> int:
        """Shares that the tokens are dealt into."""
        return self.ranks // self.row

    @property
    def unit(self) -> int:
        """The tokens (of a chunk, for `interleaved`) are padded to a multiple of it."""
        halves = self.kind == LayoutKind.ZIGZAG or (self.kind == LayoutKind.INTERLEAVED and self.rows > 1)
        return self.rows * math.lcm(2, self.row) if halves else self.ranks

    @property
    def local_tokens(self) -> int:
        """Tokens of every rank, padding included."""
        return self.tokens // self.ranks

    def pieces(self, rank: int) -> tuple[Range, ...]:
        """Global ranges `[start, stop)` that a rank holds, in its order."""
        return self._pieces[rank]

    def share(self, number: int) -> tuple[Range, ...]:
        """Global ranges that the ranks of one row hold together, in order."""
        return self._shares[number]

    def index(self, rank: int) -> Tensor:
        """int64 `[local_tokens]`: global position of each of the rank's tokens; from the row's end on it is padding."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.pieces(rank)])

    def inverse(self) -> Tensor:
        """int64 `[tokens]`: where each global position stands when the ranks' tokens are put one after another."""
        order = torch.cat([self.index(rank) for rank in range(self.ranks)])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(self.tokens)
        return inverse

    def rank_of(self, position: int) -> int:
        """The rank that holds a global position."""
        if not 0 <= position < self.tokens:
            raise LayoutError(f"position must lie in [0, {self.tokens}); got {position}.")
        return next(
            rank for rank, pieces in enumerate(self._pieces) if any(start <= position < stop for start, stop in pieces)
        )

    @property
    def _chunk(self) -> int:
        return self.chunk_tokens or self.tokens

    @cached_property
    def _pieces(self) -> tuple[tuple[Range, ...], ...]:
        if self.row == 1:
            return self._shares
        if self.kind == LayoutKind.INTERLEAVED:
            return tuple(
                tuple(piece for share in self._chunk_shares(rank // self.row) for piece in self._part(share, rank))
                for rank in range(self.ranks)
            )
        return tuple(self._part(self._shares[rank // self.row], rank) for rank in range(self.ranks))

    def _part(self, share: tuple[Range, ...], rank: int) -> tuple[Range, ...]:
        """A rank's part of what its row holds."""
        size = sum(stop - start for start, stop in share) // self.row
        return cut(share, rank % self.row * size, (rank % self.row + 1) * size)

    @cached_property
    def _shares(self) -> tuple[tuple[Range, ...], ...]:
        rows = range(self.rows)
        if self.kind == LayoutKind.CONTIGUOUS:
            size = self.tokens // self.rows
            return tuple(((row * size, (row + 1) * size),) for row in rows)
        if self.kind == LayoutKind.ZIGZAG:
            return tuple(_zigzag(0, self.tokens, self.rows, row) for row in rows)
        if self.kind == LayoutKind.INTERLEAVED:
            return tuple(tuple(piece for chunk in self._chunk_shares(row) for piece in chunk) for row in rows)
        return self._document_shares()

    def _chunk_shares(self, row: int) -> Iterator[tuple[Range, ...]]:
        """What a row holds of every chunk; the last chunk may be shorter."""
        for start in range(0, self.tokens, self._chunk):
            stop = min(start + self._chunk, self.tokens)
            yield ((start, stop),) if self.rows == 1 else _zigzag(start, stop, self.rows, row)

    def _document_shares(self) -> tuple[tuple[Range, ...], ...]:
        """Every document in 2R pieces of m or m + 1 tokens, `n = 2R m + x`, for R rows.

        The x extra tokens go to the rows in turn, going on where the document before stopped; a row's first extra
        enlarges its early piece, its second the late one. So all rows hold the same number of tokens.
        """
        rows = self.rows
        pieces: list[list[Range]] = [[] for _ in range(rows)]
        turn = 0
        for start, stop in pairwise(self._borders):
            least, extra = divmod(stop - start, 2 * rows)
            shares = [(extra - (row - turn) % rows + rows - 1) // rows for row in range(rows)]
            sizes = [least + (share >= 1) for share in shares] + [least + (share >= 2) for share in reversed(shares)]
            for number, size in enumerate(sizes):
                if size:
                    pieces[min(number, 2 * rows - 1 - number)].append((start, start + size))
                start += size
            turn = (turn + extra) % rows
        return tuple(tuple(of_row) for of_row in pieces)


def cut(ranges: Sequence[Range], start: int, stop: int) -> tuple[Range, ...]:
    """What stands at places `[start, stop)` when ranges are put one after another."""
    pieces, place = [], 0
    for a, b in ranges:
        first, last = max(a, a + start - place), min(b, a + stop - place)
        if first < last:
            pieces.append((first, last))
        place += b - a
    return tuple(pieces)


def _zigzag(start: int, stop: int, rows: int, row: int) -> tuple[Range, ...]:
    """Of 2R equal pieces, those that row r of R holds."""
    size = (stop - start) // (2 * rows)
    return tuple((start + p * size, start + (p + 1) * size) for p in (row, 2 * rows - 1 - row))
