"""Which tokens of a row each rank holds, in closed form and with its inverse.

Everything that travels with tokens (ids, shifted labels, positions) is indexed with the same `index(rank)`, so a layout
is data and not code. Padding is added to the row's end only, as few tokens as the layout needs.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    ) -> None:
        self.kind = LayoutKind(kind)
        self.ranks = ranks
        if tokens < 1 or ranks < 1:
            raise LayoutError(f"a layout needs at least 1 token and 1 rank; got {tokens} and {ranks}.")
        if (chunk_tokens is not None) != (self.kind == LayoutKind.INTERLEAVED):
            raise LayoutError(f"`chunk_tokens` belongs to interleaved layouts; got {chunk_tokens} for {self.kind}.")
        if chunk_tokens is not None and (chunk_tokens < 1 or chunk_tokens % ranks):
            raise LayoutError(f"`chunk_tokens` must be a multiple of {ranks} ranks; got {chunk_tokens}.")
        starts = tuple(cu_seqlens or (0, tokens))
        if starts[0] != 0 or starts[-1] != tokens or any(b <= a for a, b in pairwise(starts)):
            raise LayoutError(
                f"`cu_seqlens` must start at 0, increase strictly and end at the row's {tokens} tokens; "
                f"got {[*starts]}."
            )
        unit = 2 * ranks if self.kind == LayoutKind.ZIGZAG else ranks
        self.pad = -tokens % unit
        self.tokens = tokens + self.pad
        self.chunk_tokens = chunk_tokens
        # Padding is dealt out like one more document.
        self._borders = (*starts, self.tokens) if self.pad else starts

    @property
    def local_tokens(self) -> int:
        """Tokens of every rank, padding included."""
        return self.tokens // self.ranks

    def pieces(self, rank: int) -> tuple[Range, ...]:
        """Global ranges `[start, stop)` that a rank holds, in its order."""
        return self._pieces[rank]

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
        if self.kind == LayoutKind.CONTIGUOUS:
            return position // self.local_tokens
        if self.kind == LayoutKind.ZIGZAG:
            piece = position // (self.tokens // (2 * self.ranks))
            return min(piece, 2 * self.ranks - 1 - piece)
        if self.kind == LayoutKind.INTERLEAVED:
            chunk, offset = divmod(position, self._chunk)
            length = min(self._chunk, self.tokens - chunk * self._chunk)
            return offset // (length // self.ranks)
        return next(
            rank for rank, pieces in enumerate(self._pieces) if any(start <= position < stop for start, stop in pieces)
        )

    @property
    def _chunk(self) -> int:
        return self.chunk_tokens or self.tokens

    @cached_property
    def _pieces(self) -> tuple[tuple[Range, ...], ...]:
        ranks = range(self.ranks)
        if self.kind == LayoutKind.CONTIGUOUS:
            return tuple(((r * self.local_tokens, (r + 1) * self.local_tokens),) for r in ranks)
        if self.kind == LayoutKind.ZIGZAG:
            size = self.tokens // (2 * self.ranks)
            return tuple(tuple((p * size, (p + 1) * size) for p in (r, 2 * self.ranks - 1 - r)) for r in ranks)
        if self.kind == LayoutKind.INTERLEAVED:
            return tuple(self._chunk_pieces(r) for r in ranks)
        return self._document_pieces()

    def _chunk_pieces(self, rank: int) -> tuple[Range, ...]:
        """The rank's part of every chunk; the last chunk may be shorter."""
        pieces = []
        for start in range(0, self.tokens, self._chunk):
            size = min(self._chunk, self.tokens - start) // self.ranks
            pieces.append((start + rank * size, start + (rank + 1) * size))
        return tuple(pieces)

    def _document_pieces(self) -> tuple[tuple[Range, ...], ...]:
        """Every document in 2P pieces of m or m + 1 tokens, `n = 2P m + x`.

        The x extra tokens go to the ranks in turn, going on where the document before stopped; a rank's first extra
        enlarges its early piece, its second the late one. So all ranks hold the same number of tokens.
        """
        pieces: list[list[Range]] = [[] for _ in range(self.ranks)]
        turn = 0
        for start, stop in pairwise(self._borders):
            least, extra = divmod(stop - start, 2 * self.ranks)
            shares = [(extra - (rank - turn) % self.ranks + self.ranks - 1) // self.ranks for rank in range(self.ranks)]
            sizes = [least + (share >= 1) for share in shares] + [least + (share >= 2) for share in reversed(shares)]
            for number, size in enumerate(sizes):
                if size:
                    pieces[min(number, 2 * self.ranks - 1 - number)].append((start, start + size))
                start += size
            turn = (turn + extra) % self.ranks
        return tuple(tuple(rank_pieces) for rank_pieces in pieces)
