"""What a row is, and what the loader asks of whoever has rows: a packed file, documents packed in memory, or a stream.

A row is named by (epoch, window, number). A window is a group of documents packed together, an epoch a run of windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from freight.data.documents import Documents
from freight.data.pack.packing import PackedRows


@dataclass(frozen=True, eq=False)
class Row:
    """The documents of one row, without any padding.

    Args:
        ids: int32 `[tokens]`, spans one after another.
        loss_mask: bool `[tokens]`; entry i says token i is a target, False at the first token of a span.
        lengths: int `[spans]`, tokens of each.
        tail_labels: int `[spans]`, what the last token of the span predicts, -1 if nothing.
        documents: int `[spans]`, index of the document in its source.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    tail_labels: np.ndarray
    documents: np.ndarray

    @property
    def num_targets(self) -> int:
        """Labels of the row."""
        return int(np.count_nonzero(self.loss_mask)) + int(np.count_nonzero(self.tail_labels >= 0))

    @property
    def num_tokens(self) -> int:
        """Real tokens of the row."""
        return len(self.ids)


def make_row(documents: Documents, spans: Sequence[tuple[int, int, int]]) -> Row:
    """The tokens of a row.

    Args:
        documents: Where they stand.
        spans: `(document, start, length)` of each, at least one.
    """
    pieces = [documents[document].piece(start, start + length) for document, start, length in spans]
    return Row(
        ids=np.concatenate([piece.ids for piece in pieces]),
        loss_mask=np.concatenate([piece.loss_mask for piece in pieces]),
        lengths=np.array([length for _, _, length in spans]),
        tail_labels=np.array([piece.tail_label for piece in pieces]),
        documents=np.array([document for document, _, _ in spans]),
    )


def rows_of(plan: PackedRows, documents: Documents) -> Iterator[Row]:
    """Rows of a plan, in order."""
    return (make_row(documents, plan.row(number)) for number in range(len(plan)))


class RowSource(Protocol):
    """Where the loader gets its rows.

    An epoch is a run of windows, a window a run of rows; rows are named by numbers alone. `dealt_to` says how many data
    ranks share the source, each holding rows of its own; None where every rank has them all.
    """

    pack_size: int
    document_multiple: int
    pad_id: int
    seed: int
    fingerprint: str
    metadata: dict[str, Any]
    dealt_to: int | None

    @property
    def packing(self) -> dict[str, Any]:
        """What decides the rows beside the documents; a resumed run must have the same."""
        ...

    def rows_in(self, epoch: int, window: int) -> int:
        """Rows of one window of one epoch; 0 if the epoch has no such window."""
        ...

    def row(self, epoch: int, window: int, number: int) -> Row:
        """One row; may be called from several threads."""
        ...

    def epochs_done(self, epoch: int, window: int, row: int) -> float:
        """Epochs before a row, windows counted as equally large."""
        ...

    def source_of(self, document: int) -> str:
        """Name of the source of a document, for losses per source."""
        ...

    def mark(self, window: int) -> dict[str, Any] | None:
        """What a restarted run needs beside the numbers to find a window again; None if nothing."""
        ...

    def return_to(self, window: int, mark: dict[str, Any]) -> None:
        """Be ready for a window that an earlier run marked."""
        ...

    def indexed(self) -> IndexedRows | None:
        """Itself, if its size is known before it is read."""
        ...


class IndexedRows(RowSource, Protocol):
    """Rows whose number is known up front, because all documents are."""

    num_documents: int
    num_tokens: int
    max_length: int
    mixture: list[SourceShare]

    @property
    def num_rows(self) -> int:
        """Rows of the first epoch."""
        ...

    @property
    def packing_factor(self) -> float:
        """Documents per row."""
        ...

    def first_epoch(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of every span, and real tokens of every row, of the first epoch; for reports."""
        ...


class Unmarked:
    """For rows that their numbers alone find again, on every rank."""

    dealt_to: int | None = None

    def mark(self, window: int) -> dict[str, Any] | None:
        """See `RowSource.mark`."""
        return None

    def return_to(self, window: int, mark: dict[str, Any]) -> None:
        """See `RowSource.return_to`."""
        raise AssertionError(mark)


class SourceShare(NamedTuple):
    """One source of a mixture.

    Args:
        name: Of the source.
        documents: That it has.
        share: Of all samples.
        taken: Samples in the first epoch.
    """

    name: str
    documents: int
    share: float
    taken: int

    def __str__(self) -> str:
        passes = self.taken / self.documents
        return f"{self.name} {self.share:.2%}, {self.taken:,} of its {self.documents:,} documents ({passes:.2f} passes)"
