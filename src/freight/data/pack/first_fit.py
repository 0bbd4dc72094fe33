"""First fit: the lowest-numbered row that has room. O(N log R) by a segment tree of maxima over the rows' rooms.

1M documents take about 2 s in plain Python on one slow core; the plain scan over rows takes hours.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def first_fit(lengths: np.ndarray, pack_size: int) -> np.ndarray:
    """Row of each document, placed in the given order.

    Two rows can never both be at most half full (the later one's first document would have fitted), so
    `2 * bound + 1` leaves suffice. All start with full room: rows not yet opened are found by the same search, and
    opened by it.

    Args:
        lengths: int `[documents]`, each in 1..pack_size.
        pack_size: Tokens of a row.

    Returns:
        int32 `[documents]`; rows are numbered as opened.
    """
    bound = -(-int(lengths.sum()) // pack_size)
    leaves = 1 << (max(1, min(len(lengths), 2 * bound + 1)) - 1).bit_length()
    room = [pack_size] * (2 * leaves)  # node i has children 2i and 2i + 1; leaf of row r is leaves + r
    rows = np.empty(len(lengths), dtype=np.int32)
    for document, length in enumerate(_integers(lengths)):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        rows[document] = node - leaves
        largest = room[node] = room[node] - length
        while node > 1:
            sibling = room[node ^ 1]
            if sibling > largest:
                largest = sibling
            node >>= 1
            if room[node] == largest:
                break
            room[node] = largest
    return rows


def _integers(values: np.ndarray, block: int = 65536) -> Iterator[int]:
    """Python integers of an array, made a block at a time: 36 bytes each would otherwise exist all at once."""
    for start in range(0, len(values), block):
        yield from values[start : start + block].tolist()
