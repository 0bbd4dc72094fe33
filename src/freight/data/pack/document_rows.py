"""Rows packed in memory: other rows in every epoch, packed a window at a time, the next one while this one is read.

Rows follow from integers alone, so any rank, worker or restarted run finds the same row under the same name, and no
buffer of left-over documents exists that would have to be saved.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from freight.data.documents import Documents
from freight.data.pack.document_order import DocumentOrder, EveryDocument, MixedSources, documents_per_source
from freight.data.pack.mixture import Mixture
from freight.data.pack.packing import PackedRows, check_pack_size, pack
from freight.data.pack.rows import IndexedRows, Row, SourceShare, Unmarked, make_row
from freight.errors import DataError

WINDOWS_KEPT = 3  # the loader works ahead: the end of one window is read with the start of the next, and one is packed
WORTH_PACKING_AHEAD = 20_000  # documents of a window; fewer are packed in less time than a step takes


class DocumentRows(Unmarked):
    """Rows packed in memory, other rows in every epoch.

    The documents of an epoch stand in the order of a keyed permutation, or as a mixture has them, and are packed
    `window_documents` at a time.

    Args:
        documents: The documents.
        algorithm: See `pack`.
        pack_size: Tokens of a row.
        seed: Order of the documents in each epoch.
        packing_seed: Order and ties inside a window; by default `seed`.
        shuffle: False: every epoch has the documents in their own order, and the same rows.
        document_multiple: Every span takes the next multiple of it.
        window_documents: Documents packed together; None = all of them.
        weights: Of each source by name, in the order of the documents; None = every document once in an epoch.
    """

    def __init__(
        self,
        documents: Documents,
        algorithm: str,
        pack_size: int,
        seed: int = 0,
        *,
        packing_seed: int | None = None,
        shuffle: bool = True,
        document_multiple: int = 1,
        window_documents: int | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if not len(documents):
            skipped = documents.metadata.get("skipped") or {}
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in skipped.items())
            raise DataError(f"0 documents to pack{f' (skipped: {reasons})' if reasons else ''}.")
        check_pack_size(pack_size, document_multiple)
        self._documents = documents
        self._algorithm = algorithm
        self._packing_seed = seed if packing_seed is None else packing_seed
        self._shuffle = shuffle
        self._window_documents = window_documents
        self._weights = dict(weights or {})
        self._documents_in_window = min(window_documents or len(documents), len(documents))
        self._plans: OrderedDict[tuple[int, int], Future[tuple[np.ndarray, PackedRows]]] = OrderedDict()
        self._packer = ThreadPoolExecutor(1, "freight-packer")  # starts no thread before there is work
        self._counts: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self.pack_size = pack_size
        self.document_multiple = document_multiple
        self.seed = seed
        self.pad_id: int = documents.metadata["pad_id"]
        self.fingerprint = documents.fingerprint
        self.num_documents = len(documents)
        self.max_length = min(int(documents.lengths.max()), pack_size)
        self.metadata = documents.metadata
        self.mixture: list[SourceShare] = []
        key = (seed, self.fingerprint) if shuffle else None
        self._order: DocumentOrder = EveryDocument(len(documents), key)
        if self._weights:
            counts = documents_per_source(documents, list(self._weights))
            shares = Mixture(list(self._weights.values()))
            self._order = MixedSources(counts, shares, key)
            taken = shares.taken(len(documents))
            self.mixture = [
                SourceShare(name, count, float(share), int(number))
                for name, count, share, number in zip(self._weights, counts, shares.shares, taken, strict=True)
            ]
        self._num_windows = -(-len(documents) // self._documents_in_window)
        self.num_tokens = self._tokens_of_first_epoch()

    @property
    def num_rows(self) -> int:
        """Rows of the first epoch."""
        return sum(self.rows_in(0, window) for window in range(self._num_windows))

    @property
    def packing_factor(self) -> float:
        """Documents per row, in the first epoch."""
        return self.num_documents / self.num_rows

    @property
    def packing(self) -> dict[str, Any]:
        """See `RowSource.packing`."""
        return {
            "algorithm": self._algorithm,
            "pack_size": self.pack_size,
            "seed": self._packing_seed,
            "document_multiple": self.document_multiple,
            "window_documents": self._window_documents,
            "shuffle": self._shuffle,
            **({"weights": self._weights} if self._weights else {}),
        }

    def indexed(self) -> IndexedRows:
        """See `RowSource.indexed`."""
        return self

    def first_epoch(self) -> tuple[np.ndarray, np.ndarray]:
        """See `RowSource.first_epoch`."""
        plans = [self._plan(0, window)[1] for window in range(self._num_windows)]
        return np.concatenate([plan.lengths for plan in plans]), np.concatenate([plan.tokens_of_rows for plan in plans])

    def rows_in(self, epoch: int, window: int) -> int:
        """Rows of one window; packs it if it has not been packed yet."""
        if window >= self._num_windows:
            return 0
        if (epoch, window) not in self._counts:
            self._counts[epoch, window] = len(self._plan(epoch, window)[1])
        return self._counts[epoch, window]

    def row(self, epoch: int, window: int, number: int) -> Row:
        """One row, its documents read now."""
        order, rows = self._plan(epoch, window)
        if self._documents_in_window >= WORTH_PACKING_AHEAD and 2 * number >= len(rows):
            self._pack_ahead(epoch, window)
        spans = [(int(order[document]), start, length) for document, start, length in rows.row(number)]
        return make_row(self._documents, spans)

    def epochs_done(self, epoch: int, window: int, row: int) -> float:
        """See `RowSource.epochs_done`."""
        if window >= self._num_windows:
            return epoch + 1.0
        return epoch + (window + row / self.rows_in(epoch, window)) / self._num_windows

    def source_of(self, document: int) -> str:
        """Name of the source of a document."""
        return self._documents.source_of(document)

    def _plan(self, epoch: int, window: int) -> tuple[np.ndarray, PackedRows]:
        """The documents of a window, and how they share rows; packed by whoever asks first, others wait for it."""
        with self._lock:
            plan = self._plans.get((epoch, window))
            mine = plan is None
            if plan is None:
                plan = self._keep(epoch, window, Future())
        if mine:
            try:
                plan.set_result(self._packed(epoch, window))
            except BaseException as error:
                plan.set_exception(error)
        return plan.result()

    def _pack_ahead(self, epoch: int, window: int) -> None:
        """Begin to pack the window after this one, so that no step waits seconds for it."""
        following = (epoch, window + 1) if window + 1 < self._num_windows else (epoch + 1, 0)
        with self._lock:
            if following not in self._plans:
                self._keep(*following, self._packer.submit(self._packed, *following))

    def _keep(
        self, epoch: int, window: int, plan: Future[tuple[np.ndarray, PackedRows]]
    ) -> Future[tuple[np.ndarray, PackedRows]]:
        self._plans[epoch, window] = plan
        if len(self._plans) > WINDOWS_KEPT:
            self._plans.popitem(last=False)
        return plan

    def _packed(self, epoch: int, window: int) -> tuple[np.ndarray, PackedRows]:
        order = self._window(epoch, window)
        rows = pack(
            self._documents.lengths[order],
            self._algorithm,
            self.pack_size,
            self._packing_seed,
            epoch=epoch,
            window=window,
            document_multiple=self.document_multiple,
            shuffle=self._shuffle,
        )
        return order, rows

    def _tokens_of_first_epoch(self) -> int:
        if not self._weights:
            return int(self._documents.lengths.sum(dtype=np.int64))
        windows = (self._window(0, window) for window in range(self._num_windows))
        return sum(int(self._documents.lengths[order].sum(dtype=np.int64)) for order in windows)

    def _window(self, epoch: int, window: int) -> np.ndarray:
        """int64: the documents of a window in their order."""
        start = window * self._documents_in_window
        return self._order.at(epoch, np.arange(start, min(start + self._documents_in_window, self.num_documents)))
