"""Packed rows in a file, format version 1: Arrow IPC, read through a memory map, or Parquet with the same schema.

One record is one row. Padding is not stored, and boundaries come from `lengths` alone: nobody ever searches the ids for
a separator. What made the rows stands in the schema's metadata as one JSON with a checksum. Arrow gives random rows
without reading the file; Parquet is smaller, and is decoded whole into memory when opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import freight
from freight.data.documents import Documents
from freight.data.packing import PackedRows
from freight.data.rows import Row
from freight.errors import DataError

FORMAT = "freight-packed"
VERSION = 1
METADATA_KEY = b"freight"
CHECKSUM_KEY = b"freight_checksum"
TOKENS_PER_BATCH = 1 << 20
SUFFIXES = (".arrow", ".parquet")
COLUMNS = pa.schema(
    [
        ("input_ids", pa.large_list(pa.int32())),
        ("loss_mask", pa.large_list(pa.bool_())),
        ("lengths", pa.list_(pa.int32())),
        ("tail_labels", pa.list_(pa.int32())),
        ("documents", pa.list_(pa.int64())),
    ]
)

Progress = Callable[[int, int, str], None]


def packed_metadata(rows: PackedRows, documents: Documents, seed: int) -> dict[str, Any]:
    """What a packed file says about itself; equal for equal documents and packing.

    Args:
        rows: The plan.
        documents: What it was made for.
        seed: The seed it was made with.
    """
    facts = documents.metadata
    return {
        "format": FORMAT,
        "version": VERSION,
        "pack_size": rows.pack_size,
        "algorithm": rows.algorithm,
        "seed": seed,
        "document_multiple": rows.document_multiple,
        "mask_alignment": "token",
        **{
            key: facts.get(key)
            for key in (
                "sequence_length",
                "truncation",
                "tokenizer_hash",
                "template_hash",
                "vocab_size",
                "pad_id",
                "num_target_tokens",
                "sources",
                "skipped",
            )
        },
        "num_documents": len(documents),
        "num_rows": len(rows),
        "num_tokens": rows.num_tokens,
        "packing_factor": len(documents) / len(rows),
        "efficiency": rows.efficiency,
        "fill": rows.fill,
        "max_documents_per_row": int(rows.documents_of_rows.max()),
        "max_length": int(rows.lengths.max()),
        "fingerprint": documents.fingerprint,
        "freight": freight.__version__,
    }


def write_packed(
    path: Path,
    rows: PackedRows,
    documents: Documents,
    metadata: dict[str, Any],
    progress: Progress | None = None,
) -> None:
    """Write rows to `path`, under a temporary name until complete.

    Args:
        path: Ends in `.arrow` or `.parquet`.
        rows: The plan.
        documents: The documents it names.
        metadata: From `packed_metadata`.
        progress: Called with rows written, rows in all, and a word.

    Raises:
        DataError: Another suffix.
    """
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: a packed file ends in .arrow or .parquet; got {path.suffix!r}.")
    text = json.dumps(metadata, sort_keys=True)
    schema = COLUMNS.with_metadata({METADATA_KEY: text, CHECKSUM_KEY: _checksum(text)})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    try:
        writer = (
            pq.ParquetWriter(temporary, schema, compression="zstd")
            if path.suffix == ".parquet"
            else pa.ipc.new_file(str(temporary), schema)
        )
        with writer:
            for first, stop in _batches(rows):
                writer.write_batch(_record_batch(rows, documents, first, stop, schema))
                if progress:
                    progress(stop, len(rows), f"write {path.name}")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _batches(rows: PackedRows) -> Iterator[tuple[int, int]]:
    """Ranges of rows with about `TOKENS_PER_BATCH` tokens."""
    per_batch = max(1, TOKENS_PER_BATCH // rows.pack_size)
    for first in range(0, len(rows), per_batch):
        yield first, min(first + per_batch, len(rows))


def _record_batch(rows: PackedRows, documents: Documents, first: int, stop: int, schema: pa.Schema) -> pa.RecordBatch:
    spans = slice(rows.offsets[first], rows.offsets[stop])
    indices, starts, lengths = rows.documents[spans], rows.starts[spans], rows.lengths[spans]
    pieces = [
        documents[index].piece(start, start + length)
        for index, start, length in zip(indices.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    ]
    span_offsets = rows.offsets[first : stop + 1] - rows.offsets[first]
    token_offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[span_offsets]

    def tokens(values: list[np.ndarray], kind: pa.DataType) -> pa.Array:
        return pa.LargeListArray.from_arrays(pa.array(token_offsets), pa.array(np.concatenate(values), kind))

    def per_span(values: Any, kind: pa.DataType) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(span_offsets, pa.int32()), pa.array(values, kind))

    columns = [
        tokens([piece.ids for piece in pieces], pa.int32()),
        tokens([piece.loss_mask for piece in pieces], pa.bool_()),
        per_span(lengths, pa.int32()),
        per_span([piece.tail_label for piece in pieces], pa.int32()),
        per_span(indices.astype(np.int64), pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_metadata(path: Path) -> dict[str, Any]:
    """The checked metadata of a packed file.

    Raises:
        DataError: Missing, damaged, of another kind or another version.
    """
    return _checked_metadata(path, _open(path)[0])


def is_packed(path: Path) -> bool:
    """Whether a file carries the metadata of a packed file, damaged or not."""
    if path.suffix not in SUFFIXES or not path.is_file():
        return False
    try:
        return METADATA_KEY in (_open(path)[0].metadata or {})
    except DataError:
        return False


def _open(path: Path) -> tuple[pa.Schema, pa.RecordBatchFileReader | pq.ParquetFile]:
    if not path.is_file():
        raise DataError(f"{path}: no such packed file.")
    try:
        if path.suffix == ".parquet":
            parquet = pq.ParquetFile(path)
            # Parquet keeps the metadata twice, plainly and inside an encoded Arrow schema; the plain one counts.
            return parquet.schema_arrow.with_metadata(parquet.metadata.metadata), parquet
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        return reader.schema, reader
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:] or 'arrow'} ({error}); pack it again.") from error


def _checked_metadata(path: Path, schema: pa.Schema) -> dict[str, Any]:
    entries = schema.metadata or {}
    if METADATA_KEY not in entries:
        raise DataError(f"{path}: is no packed file: its schema has no `{METADATA_KEY.decode()}` metadata.")
    try:
        text = entries[METADATA_KEY].decode()
        metadata = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: metadata is damaged ({error}); pack it again.") from error
    if entries.get(CHECKSUM_KEY, b"").decode("latin-1") != _checksum(text):
        raise DataError(f"{path}: metadata is damaged (checksum differs); pack it again.")
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise DataError(
            f"{path}: has format {metadata.get('format')} version {metadata.get('version')}; this program reads "
            f"{FORMAT} version {VERSION}. Pack it again, or use the release that wrote it."
        )
    if not schema.remove_metadata().equals(COLUMNS):
        raise DataError(f"{path}: columns are {', '.join(schema.names)}; expected {', '.join(COLUMNS.names)}.")
    return metadata


class PackedFile:
    """Rows of a packed file by number.

    Args:
        path: An `.arrow` or `.parquet` file.

    Raises:
        DataError: Missing, damaged, of another kind or another version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        schema, reader = _open(self.path)
        self.metadata = _checked_metadata(self.path, schema)
        if isinstance(reader, pq.ParquetFile):
            self._batches = reader.read().to_batches()
        else:
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])
        rows = int(self._ends[-1]) if len(self._ends) else 0
        if rows != self.metadata["num_rows"]:
            raise DataError(f"{self.path}: holds {rows:,} rows, its metadata say {self.metadata['num_rows']:,}.")

    def __len__(self) -> int:
        return self.metadata["num_rows"]

    def __getitem__(self, number: int) -> Row:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        index = int(np.searchsorted(self._ends, number, side="right"))
        batch = self._batches[index]
        local = number - (int(self._ends[index - 1]) if index else 0)
        ids, mask, lengths, tails, documents = (
            column[local].values.to_numpy(zero_copy_only=False) for column in batch.columns
        )
        row = Row(ids, mask, lengths, tails, documents)
        if len(mask) != len(ids) or lengths.sum() != len(ids) or lengths.min(initial=1) < 1:
            raise DataError(f"{self.path}: row {number} is damaged: lengths {lengths.tolist()} for {len(ids)} tokens.")
        return row

    def shape(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of every span, and real tokens of every row; reads no ids."""
        columns = [batch.column("lengths") for batch in self._batches]
        spans = [column.flatten().to_numpy() for column in columns]
        rows = [
            np.add.reduceat(tokens, column.offsets.to_numpy()[:-1] - column.offsets[0].as_py())
            for tokens, column in zip(spans, columns, strict=True)
        ]
        return np.concatenate(spans), np.concatenate(rows)

    @property
    def fingerprint(self) -> str:
        """Changes when documents or packing change, not with the release that wrote the file."""
        facts = {key: value for key, value in self.metadata.items() if key != "freight"}
        return _checksum(json.dumps(facts, sort_keys=True))

    def check_model(self, *, tokenizer_hash: str | None, template_hash: str | None, vocab_size: int | None) -> None:
        """Refuse a file that was made for another tokenizer, chat template or a larger vocabulary; None = not compared.

        Raises:
            DataError: Names both values.
        """
        for name, mine in (("tokenizer_hash", tokenizer_hash), ("template_hash", template_hash)):
            packed = self.metadata[name]
            if mine is not None and packed is not None and mine != packed:
                what = name.removesuffix("_hash").replace("template", "chat template")
                raise DataError(
                    f"{self.path}: was packed with another {what} ({packed[:12]}; the config's is {mine[:12]}). "
                    "Pack again, or use the same one."
                )
        if vocab_size is not None and self.metadata["vocab_size"] > vocab_size:
            raise DataError(
                f"{self.path}: has a vocabulary of {self.metadata['vocab_size']:,}, the model {vocab_size:,}. "
                f"Set model.vocab_size={self.metadata['vocab_size']}, or pack with the model's tokenizer."
            )
