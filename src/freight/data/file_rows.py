"""A packed file as a source of rows: the rows never change, their order does in every epoch."""

from __future__ import annotations

from typing import Any

import numpy as np

from freight.data.order import Permutation
from freight.data.packed_file import PackedFile
from freight.data.rows import Row


class FileRows:
    """The rows of a packed file as a `RowSource`: always the same rows, in another order each epoch.

    Args:
        file: The file.
        seed: Order of the rows in each epoch.
        shuffle: False: the order of the file.
    """

    num_windows = 1

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
        return len(self._file)

    def row(self, epoch: int, window: int, number: int) -> Row:
        """The row at a place of the epoch's order."""
        if self._shuffle:
            number = Permutation(len(self._file), (self.seed, epoch, self.fingerprint))[number]
        return self._file[number]

    def source_of(self, document: int) -> str:
        """The only source's name; the file's own name when it was packed from several."""
        sources = self.metadata["sources"] or []
        return str(sources[0]["path"]) if len(sources) == 1 else self._file.path.name
