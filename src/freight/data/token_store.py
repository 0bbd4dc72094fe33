"""Where documents go while they are made: to Arrow files that are memory-mapped later, or to a list.

Masks are kept as runs, ids as uint16 where the vocabulary allows: about 2.1 bytes per token. A store is written in a
temporary folder and renamed when complete, so a folder with the final name is always whole.
"""

from __future__ import annotations

import json
import shutil
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freight.data.documents import Document, Fingerprint, InMemoryDocuments
from freight.data.records import Place, describe_place

BATCH_TOKENS = 1 << 22
DATA_FILE = "documents.arrow"
META_FILE = "meta.json"


class FileEntry(NamedTuple):
    """One source file: what `origin` and `source_of` say of its documents."""

    path: str
    kind: str
    source: str


class ArrowSink:
    """Writes documents to a folder, a batch of tokens at a time.

    Args:
        folder: Exists; gets `documents.arrow`, and `meta.json` last.
        vocab_size: Decides the width of ids.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder = folder
        self._id_type = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._schema = pa.schema(
            [
                ("ids", pa.large_list(pa.from_numpy_dtype(self._id_type))),
                ("runs", pa.large_list(pa.int32())),
                ("tail", pa.int32()),
                ("file", pa.int32()),
                ("number", pa.int64()),
            ]
        )
        self._writer = pa.ipc.new_file(str(folder / DATA_FILE), self._schema)
        self._documents: list[Document] = []
        self._places: list[tuple[int, int]] = []
        self._tokens = 0
        self._fingerprint = Fingerprint()

    def add(self, document: Document, file: int, place: Place) -> None:
        """Take the next document.

        Args:
            document: Its ids and targets.
            file: Index of its file.
            place: Where its record stands.
        """
        self._documents.append(document)
        self._places.append((file, place.number))
        self._tokens += len(document)
        self._fingerprint.add(document)
        if self._tokens >= BATCH_TOKENS:
            self._flush()

    def finish(self, files: list[FileEntry], metadata: dict[str, Any]) -> None:
        """Write what is left and the metadata."""
        self._flush()
        self._writer.close()
        meta = {"files": files, "fingerprint": self._fingerprint.text(), "metadata": metadata}
        (self.folder / META_FILE).write_text(json.dumps(meta, indent=1), encoding="utf-8")

    def abort(self) -> None:
        """Give the folder up."""
        self._writer.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _flush(self) -> None:
        if not self._documents:
            return
        documents = self._documents
        runs = [target_runs(document.loss_mask) for document in documents]
        columns = [
            lists_of([document.ids for document in documents], self._id_type),
            lists_of(runs, np.int32),
            pa.array([document.tail_label for document in documents], pa.int32()),
            pa.array([file for file, _ in self._places], pa.int32()),
            pa.array([number for _, number in self._places], pa.int64()),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._documents, self._places, self._tokens = [], [], 0


class MemorySink:
    """Keeps documents in a list."""

    def __init__(self) -> None:
        self._documents: list[Document] = []
        self._places: list[tuple[int, Place]] = []

    def add(self, document: Document, file: int, place: Place) -> None:
        """See `ArrowSink.add`."""
        self._documents.append(document)
        self._places.append((file, place))

    def documents(self, files: list[FileEntry], metadata: dict[str, Any]) -> InMemoryDocuments:
        """All of them."""
        return InMemoryDocuments(
            self._documents,
            metadata,
            origins=[str(place) for _, place in self._places],
            sources=[files[file].source for file, _ in self._places],
        )


class Batch(NamedTuple):
    """Columns of one record batch as arrays over the mapped file."""

    id_offsets: NDArray[np.int64]
    ids: NDArray[Any]
    run_offsets: NDArray[np.int64]
    runs: NDArray[np.int32]
    tails: NDArray[np.int32]
    files: NDArray[np.int32]
    numbers: NDArray[np.int64]


class StoredDocuments:
    """Documents in a folder that `ArrowSink` wrote, memory-mapped; can be sent to other processes.

    Args:
        folder: The folder.

    Raises:
        OSError, ValueError, KeyError: It is not whole.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        self._files = [FileEntry(*entry) for entry in meta["files"]]
        self.fingerprint: str = meta["fingerprint"]
        self.metadata: dict[str, Any] = meta["metadata"]
        reader = pa.ipc.open_file(pa.memory_map(str(folder / DATA_FILE)))
        self._batches = [arrays_of(reader.get_batch(index)) for index in range(reader.num_record_batches)]
        self._firsts = np.cumsum([0, *(len(batch.tails) for batch in self._batches)]).tolist()
        lengths = [np.diff(batch.id_offsets) for batch in self._batches]
        self.lengths = np.concatenate([*lengths, np.zeros(0, dtype=np.int64)]).astype(np.int32)
        if len(self) != self.metadata["num_documents"]:
            raise ValueError(f"{folder}: {len(self)} documents, {self.metadata['num_documents']} expected")

    def __reduce__(self) -> tuple[type[StoredDocuments], tuple[Path]]:
        return StoredDocuments, (self._folder,)

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int, /) -> Document:
        batch, row = self._find(index)
        ids = batch.ids[batch.id_offsets[row] : batch.id_offsets[row + 1]].astype(np.int32)
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, stop in batch.runs[batch.run_offsets[row] : batch.run_offsets[row + 1]].reshape(-1, 2):
            mask[start:stop] = True
        return Document(ids, mask, int(batch.tails[row]))

    def origin(self, index: int, /) -> str:
        """See `Documents.origin`."""
        batch, row = self._find(index)
        file = self._files[batch.files[row]]
        return describe_place(file.path, file.kind, int(batch.numbers[row]))

    def source_of(self, index: int, /) -> str:
        """See `Documents.source_of`."""
        batch, row = self._find(index)
        return self._files[batch.files[row]].source

    def _find(self, index: int) -> tuple[Batch, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        batch = bisect_right(self._firsts, index) - 1
        return self._batches[batch], index - self._firsts[batch]


def target_runs(mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Borders of the runs of targets: start, stop, start, stop, ..."""
    padded = np.concatenate([[False], mask, [False]])
    return np.flatnonzero(padded[1:] != padded[:-1]).astype(np.int32)


def lists_of(rows: list[Any], dtype: Any) -> pa.LargeListArray:
    """One Arrow list per row."""
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    values = np.concatenate(rows).astype(dtype)
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))


def arrays_of(batch: pa.RecordBatch) -> Batch:
    """Views of a batch's columns, without a copy."""
    ids, runs = batch.column("ids"), batch.column("runs")
    plain = [batch.column(name).to_numpy() for name in ("tail", "file", "number")]
    return Batch(ids.offsets.to_numpy(), ids.values.to_numpy(), runs.offsets.to_numpy(), runs.values.to_numpy(), *plain)


def publish(temporary: Path, final: Path) -> None:
    """Rename a finished folder to its final name; if another process was first, its folder stays."""
    try:
        temporary.rename(final)
    except OSError:
        if not (final / META_FILE).exists():
            raise
        shutil.rmtree(temporary, ignore_errors=True)
