"""Where documents go while they are made: to Arrow files that are memory-mapped later, or to a list.

Files are written shard by shard. A shard that is finished stays as it is, so a build that is interrupted goes on behind
its last one; the folder gets its final name when all are complete.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freight.data.documents import Document, Fingerprint, InMemoryDocuments, document_digest
from freight.data.read.records import Place, describe_place
from freight.data.tokens.token_columns import DocumentColumns, document_of, id_type_of

BATCH_TOKENS = 1 << 22
SHARD_NAME = "documents-{:05d}.arrow"
META_FILE = "meta.json"


class FileEntry(NamedTuple):
    """One source file: what `origin` and `source_of` say of its documents."""

    path: str
    kind: str
    source: str


class ArrowSink:
    """Writes documents to a folder, a batch of tokens at a time.

    Args:
        folder: Exists; gets the shards, and `meta.json` last.
        vocab_size: Decides the width of ids.
        shards: Finished ones that are in the folder and stay; others of an earlier attempt are overwritten.
    """

    def __init__(self, folder: Path, vocab_size: int, shards: int = 0) -> None:
        self.folder = folder
        self.shards = shards
        self._schema = pa.schema(
            [
                ("ids", pa.large_list(pa.from_numpy_dtype(id_type_of(vocab_size)))),
                ("runs", pa.large_list(pa.int32())),
                ("tail", pa.int32()),
                ("file", pa.int32()),
                ("number", pa.int64()),
            ]
        )
        self._writer: pa.RecordBatchFileWriter | None = None
        self._columns: list[DocumentColumns] = []
        self._places: list[tuple[NDArray[np.int32], NDArray[np.int64]]] = []
        self._tokens = 0
        self._lengths: list[NDArray[np.int32]] = []
        self._fingerprint = Fingerprint()
        for batch in (batch for shard in range(shards) for batch in open_shard(folder, shard)):
            self._lengths.append(np.diff(batch.id_offsets).astype(np.int32))
            self._fingerprint.add(b"".join(document_digest(batch.document(row)) for row in range(len(batch.tails))))

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Of every document."""
        return np.concatenate([np.zeros(0, dtype=np.int32), *self._lengths])

    def add(self, columns: DocumentColumns, files: Sequence[int], places: Sequence[Place]) -> None:
        """Take the next documents.

        Args:
            columns: The documents.
            files: Index of each one's file.
            places: Where the record of each stands.
        """
        self._columns.append(columns)
        numbers = np.array([place.number for place in places], dtype=np.int64)
        self._places.append((np.array(files, dtype=np.int32), numbers))
        self._tokens += len(columns.ids)
        self._lengths.append(columns.lengths)
        self._fingerprint.add(columns.digests)
        if self._tokens >= BATCH_TOKENS:
            self._flush()

    def finish_shard(self) -> None:
        """Close the file that is being written, if any; what follows goes to the next one."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self.shards += 1

    def finish(self, files: list[FileEntry], metadata: dict[str, Any]) -> None:
        """Write what is left and the metadata."""
        self.finish_shard()
        meta = {"files": files, "shards": self.shards, "fingerprint": self._fingerprint.text(), "metadata": metadata}
        (self.folder / META_FILE).write_text(json.dumps(meta, indent=1), encoding="utf-8")

    def abort(self) -> None:
        """Stop writing; what was finished stays."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _flush(self) -> None:
        if not self._tokens:
            return
        if self._writer is None:
            self._writer = pa.ipc.new_file(str(self.folder / SHARD_NAME.format(self.shards)), self._schema)
        parts = self._columns
        columns = [
            lists_of([part.lengths for part in parts], [part.ids for part in parts]),
            lists_of([part.run_counts for part in parts], [part.runs for part in parts]),
            pa.array(np.concatenate([part.tails for part in parts])),
            pa.array(np.concatenate([files for files, _ in self._places])),
            pa.array(np.concatenate([numbers for _, numbers in self._places])),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._columns, self._places, self._tokens = [], [], 0


class MemorySink:
    """Keeps documents in a list."""

    def __init__(self) -> None:
        self._documents: list[Document] = []
        self._files: list[int] = []
        self._places: list[Place] = []

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Of every document."""
        return np.array([len(document) for document in self._documents], dtype=np.int32)

    def add(self, columns: DocumentColumns, files: Sequence[int], places: Sequence[Place]) -> None:
        """See `ArrowSink.add`."""
        self._documents += columns.documents()
        self._files += files
        self._places += places

    def documents(self, files: list[FileEntry], metadata: dict[str, Any]) -> InMemoryDocuments:
        """All of them."""
        return InMemoryDocuments(
            self._documents,
            metadata,
            origins=[str(place) for place in self._places],
            sources=[files[file].source for file in self._files],
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

    def document(self, row: int) -> Document:
        """One of its documents."""
        ids = self.ids[self.id_offsets[row] : self.id_offsets[row + 1]]
        runs = self.runs[self.run_offsets[row] : self.run_offsets[row + 1]]
        return document_of(ids, runs, int(self.tails[row]))


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
        self._batches = [batch for shard in range(meta["shards"]) for batch in open_shard(folder, shard)]
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
        return batch.document(row)

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


def open_shard(folder: Path, shard: int) -> list[Batch]:
    """Batches of a finished shard, memory-mapped."""
    reader = pa.ipc.open_file(pa.memory_map(str(folder / SHARD_NAME.format(shard))))
    return [arrays_of(reader.get_batch(index)) for index in range(reader.num_record_batches)]


def lists_of(lengths: Iterable[NDArray[np.int32]], values: Iterable[NDArray[Any]]) -> pa.LargeListArray:
    """One Arrow list per length."""
    offsets = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *lengths]), dtype=np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(list(values))))


def arrays_of(batch: pa.RecordBatch) -> Batch:
    """Views of a batch's columns, without a copy."""
    ids, runs = batch.column("ids"), batch.column("runs")
    plain = [batch.column(name).to_numpy() for name in ("tail", "file", "number")]
    return Batch(ids.offsets.to_numpy(), ids.values.to_numpy(), runs.offsets.to_numpy(), runs.values.to_numpy(), *plain)
