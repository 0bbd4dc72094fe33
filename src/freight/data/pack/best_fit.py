"""Best fit: the row with the least room that suffices. O(N log N): a bitmap over rooms, a heap of rows per room."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

WORD_BITS = 64


def best_fit(lengths: np.ndarray, pack_size: int) -> np.ndarray:
    """Row of each document, placed in the given order; among rows with equal room the lowest number wins.

    Args:
        lengths: int `[documents]`, each in 1..pack_size.
        pack_size: Tokens of a row.

    Returns:
        int32 `[documents]`; rows are numbered as opened.
    """
    rows_with = [[] for _ in range(pack_size + 1)]  # room -> heap of row numbers
    present = RoomSet(pack_size)
    rows = np.empty(len(lengths), dtype=np.int32)
    opened = 0
    for document, length in enumerate(lengths.tolist()):
        room = present.least_at_least(length)
        if room is None:
            room, row = pack_size, opened
            opened += 1
        else:
            row = heappop(rows_with[room])
            if not rows_with[room]:
                present.remove(room)
        rows[document] = row
        room -= length
        if room:
            if not rows_with[room]:
                present.add(room)
            heappush(rows_with[room], row)
    return rows


class RoomSet:
    """A set of integers 0..largest that finds its least member from a value on: 64-bit words, one summary integer."""

    def __init__(self, largest: int) -> None:
        self._words = [0] * (largest // WORD_BITS + 1)
        self._summary = 0  # bit w: word w is not zero

    def add(self, value: int) -> None:
        """Put a value in."""
        word, bit = divmod(value, WORD_BITS)
        self._words[word] |= 1 << bit
        self._summary |= 1 << word

    def remove(self, value: int) -> None:
        """Take out a value that is in."""
        word, bit = divmod(value, WORD_BITS)
        self._words[word] &= ~(1 << bit)
        if not self._words[word]:
            self._summary &= ~(1 << word)

    def least_at_least(self, value: int) -> int | None:
        """The least member >= value, None if there is none."""
        word, bit = divmod(value, WORD_BITS)
        found = self._words[word] >> bit
        if found:
            return value + _lowest_bit(found)
        later = self._summary >> word + 1
        if not later:
            return None
        word += 1 + _lowest_bit(later)
        return word * WORD_BITS + _lowest_bit(self._words[word])


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
