"""A packed file as a source of rows: the rows never change, their order does in every epoch."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

import numpy as np

from freight.data.order import Permutation
from freight.data.pack.packed_file import PackedFile
from freight.data.pack.rows import IndexedRows, Row, SourceShare, Unmarked


class FileRows(Unmarked):
    """The rows of a packed file as a `RowSource`: always the same rows, in another order each epoch.

    Args:
        file: The file.
        seed: Order of the rows in each epoch.
        shuffle: False: the order of the file.
    """

    def __init__(self, file: PackedFile, seed: int = 0, *, shuffle: bool = True) -> None:
        facts = file.metadata
        self._file = file
        self._shuffle = shuffle
        self.seed = seed
        self.metadata = facts
        self.fingerprint = file.fingerprint
        self.pack_size: int = facts["pack_size"]
        self.document_multiple: int = facts["document_multiple"]
        self.pad_id: int = facts["pad_id"]
        self.num_documents: int = facts["num_documents"]
        self.num_tokens: int = facts["num_tokens"]
        self.max_length: int = facts["max_length"]
        sources = [source for source in facts.get("sources") or [] if "documents" in source]
        self._names = [str(source["name"]) for source in sources]
        self._ends = list(accumulate(source["documents"] for source in sources))
        self.mixture: list[SourceShare] = []

    @property
    def num_rows(self) -> int:
        """Rows of every epoch."""
        return len(self._file)

    @property
    def packing_factor(self) -> float:
        """Documents per row."""
        return self.metadata["packing_factor"]

    @property
    def packing(self) -> dict[str, Any]:
        """See `RowSource.packing`."""
        keys = ("algorithm", "pack_size", "seed", "document_multiple")
        return {**{key: self.metadata[key] for key in keys}, "shuffle": self._shuffle}

    def first_epoch(self) -> tuple[np.ndarray, np.ndarray]:
        """See `RowSource.first_epoch`."""
        return self._file.shape()

    def rows_in(self, epoch: int, window: int) -> int:
        """Rows of the file, in any epoch."""
        return 0 if window else len(self._file)

    def epochs_done(self, epoch: int, window: int, row: int) -> float:
        """See `RowSource.epochs_done`."""
        return epoch + (1.0 if window else row / len(self._file))

    def indexed(self) -> IndexedRows:
        """See `RowSource.indexed`."""
        return self

    def row(self, epoch: int, window: int, number: int) -> Row:
        """The row at a place of the epoch's order."""
        if self._shuffle:
            number = Permutation(len(self._file), (self.seed, epoch, self.fingerprint))[number]
        return self._file[number]

    def source_of(self, document: int) -> str:
        """Name of the source of a document; the file's own where it does not know its sources."""
        source = bisect_right(self._ends, document)
        return self._names[source] if source < len(self._names) else self._file.path.stem
