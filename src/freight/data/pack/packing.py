"""Which documents share a row: functions of integers, exact and repeatable.

Only lengths, a seed and an epoch enter, so every rank computes the same plan and none waits for another. Fill on chat
data: 99.99 % (decreasing), 99.7 % (shuffle), against 20-30 % when each document is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import get_args

import numpy as np

from freight.config.schema import Algorithm
from freight.data.order import Permutation
from freight.data.pack.best_fit import best_fit
from freight.data.pack.first_fit import first_fit
from freight.errors import ConfigError, DataError

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """A plan: for every row, its spans. A span is a document, or with `split` a piece of one.

    Args:
        offsets: int64 `[rows + 1]`; the spans of row r are `offsets[r] : offsets[r + 1]`.
        documents: int32 `[spans]`, index of the span's document.
        starts: int32 `[spans]`, first token of the span inside its document; 0 without `split`.
        lengths: int32 `[spans]`, real tokens.
        pack_size: Tokens of a row.
        document_multiple: Every span takes the next multiple of it.
        algorithm: What made the plan.
    """

    offsets: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    pack_size: int
    document_multiple: int
    algorithm: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, row: int) -> list[tuple[int, int, int]]:
        """`(document, start, length)` of each span of a row."""
        spans = slice(self.offsets[row], self.offsets[row + 1])
        return list(
            zip(
                self.documents[spans].tolist(),
                self.starts[spans].tolist(),
                self.lengths[spans].tolist(),
                strict=True,
            )
        )

    @property
    def tokens_of_rows(self) -> np.ndarray:
        """int64 `[rows]`: real tokens of each row."""
        return np.diff(np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])[self.offsets])

    @property
    def documents_of_rows(self) -> np.ndarray:
        """int64 `[rows]`: spans of each row."""
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        """Real tokens of all rows."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def efficiency(self) -> float:
        """Real tokens over tokens of all rows."""
        return self.num_tokens / (len(self) * self.pack_size)

    @property
    def fill(self) -> float:
        """Least possible number of rows over rows used; 1 cannot be beaten."""
        return -(-self.num_tokens // self.pack_size) / len(self)


def pack(
    lengths: np.ndarray,
    algorithm: str,
    pack_size: int,
    seed: int,
    *,
    epoch: int = 0,
    window: int = 0,
    document_multiple: int = 1,
    shuffle: bool = True,
) -> PackedRows:
    """Put documents together in rows.

    Rows are renumbered and documents inside a row reordered by a second permutation, so that decreasing order does not
    put rows of long documents first. Attention never crosses documents: their order inside a row changes nothing.

    Args:
        lengths: int `[documents]`, tokens of each, >= 1; at most `pack_size` unless the algorithm is `split`.
        algorithm: `first_fit_decreasing`, `first_fit_shuffle`, `best_fit_decreasing`, `none` or `split`.
        pack_size: Tokens of a row, >= 2.
        seed: Chooses order and ties, for every algorithm but `none`.
        epoch: Another epoch gives other rows.
        window: Number of the group of documents packed together within the epoch.
        document_multiple: Every span takes the next multiple of it; divides `pack_size`.
        shuffle: False replaces every permutation by the identity.

    Raises:
        ConfigError: Unknown algorithm, impossible sizes.
        DataError: A document that is empty or longer than a row; no documents.
    """
    check_pack_size(pack_size, document_multiple)
    lengths = np.asarray(lengths)
    _check_lengths(lengths, algorithm, pack_size)
    key = (epoch, window)
    padded = round_up(lengths, document_multiple)
    in_order = Permutation(len(lengths), (seed, *key)).array() if shuffle else np.arange(len(lengths))
    if algorithm == "none":
        count = len(lengths)
        spans = np.arange(count), np.arange(count), np.zeros(count, np.int32), lengths
        return _numbered(*spans, pack_size, document_multiple, algorithm)
    if algorithm == "split":
        spans = _split(lengths, padded, in_order, pack_size)
    else:
        if algorithm != "first_fit_shuffle":
            in_order = in_order[np.argsort(-padded[in_order], kind="stable")]
        place = best_fit if algorithm == "best_fit_decreasing" else first_fit
        rows = place(padded[in_order], pack_size)
        spans = rows, in_order, np.zeros(len(rows), np.int32), lengths[in_order]
    if shuffle:
        spans = _renumbered(*spans, len(lengths), (seed + 1, *key))
    return _numbered(*spans, pack_size, document_multiple, algorithm)


def round_up(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """int64: the next multiple at or above each length."""
    return -(-lengths.astype(np.int64) // multiple) * multiple


def _split(
    lengths: np.ndarray, padded: np.ndarray, in_order: np.ndarray, pack_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate and cut every `pack_size` tokens; a document is cut where a row ends."""
    ends = np.cumsum(padded[in_order])
    begins = ends - padded[in_order]
    first, last = begins // pack_size, (ends - 1) // pack_size
    pieces = last - first + 1
    owner = np.repeat(np.arange(len(in_order)), pieces)
    rows = first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.maximum(rows * pack_size - begins[owner], 0)
    stops = np.minimum((rows + 1) * pack_size - begins[owner], lengths[in_order][owner])
    return rows, in_order[owner], starts, stops - starts


def _renumbered(
    rows: np.ndarray, documents: np.ndarray, starts: np.ndarray, lengths: np.ndarray, count: int, key: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows at their places in one permutation, documents inside a row by theirs."""
    rows = Permutation(int(rows.max()) + 1, key).places()[rows]
    inside = np.argsort(Permutation(count, key).places()[documents], kind="stable")
    return rows[inside], documents[inside], starts[inside], lengths[inside]


def _numbered(
    rows: np.ndarray,
    documents: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    pack_size: int,
    document_multiple: int,
    algorithm: str,
) -> PackedRows:
    by_row = np.argsort(rows, kind="stable")
    return PackedRows(
        offsets=np.concatenate([[0], np.cumsum(np.bincount(rows))]),
        documents=documents[by_row].astype(np.int32),
        starts=starts[by_row].astype(np.int32),
        lengths=lengths[by_row].astype(np.int32),
        pack_size=pack_size,
        document_multiple=document_multiple,
        algorithm=algorithm,
    )


def check_pack_size(pack_size: int, document_multiple: int = 1) -> None:
    """Refuse sizes that no packing can have.

    Raises:
        ConfigError: Smaller than 2, or no multiple of `document_multiple`.
    """
    if pack_size < 2:
        raise ConfigError(f"`data.packing.pack_size` must be at least 2 tokens; got {pack_size}.")
    if pack_size % document_multiple:
        lower = pack_size // document_multiple * document_multiple
        near = f"{lower} or {lower + document_multiple}" if lower >= 2 else f"{lower + document_multiple}"
        raise ConfigError(
            f"`data.packing.pack_size` must be a multiple of data.packing.document_multiple {document_multiple}; "
            f"got {pack_size}. Use {near}."
        )


def _check_lengths(lengths: np.ndarray, algorithm: str, pack_size: int) -> None:
    if algorithm not in ALGORITHMS:
        near = get_close_matches(algorithm, ALGORITHMS, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"`data.packing.algorithm` must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}.{hint}")
    if not len(lengths):
        raise DataError("0 documents to pack.")
    if lengths.min() < 1:
        raise DataError(f"document {int(lengths.argmin())} has length {int(lengths.min())}; it must have a token.")
    if algorithm != "split" and lengths.max() > pack_size:
        longest = int(lengths.argmax())
        raise DataError(
            f"document {longest} has {int(lengths[longest]):,} tokens, more than pack_size {pack_size:,}; set "
            f"data.truncation, or pack_size={1 << int(lengths[longest] - 1).bit_length()}."
        )
