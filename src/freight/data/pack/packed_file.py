"""Packed rows in a file, format version 1: Arrow IPC, read through a memory map, or Parquet with the same schema.

One record is one row. Padding is not stored, and boundaries come from `lengths` alone: nobody ever searches the ids for
a separator. What made the rows stands in the schema's metadata as one JSON with a checksum. Arrow gives random rows
without reading the file; Parquet is smaller, and is decoded whole into memory when opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freight.data.pack.rows import Row
from freight.data.read.packed_mark import METADATA_KEY
from freight.errors import DataError

FORMAT = "freight-packed"
VERSION = 1
CHECKSUM_KEY = b"freight_checksum"
COLUMNS = pa.schema(
    [
        ("input_ids", pa.large_list(pa.int32())),
        ("loss_mask", pa.large_list(pa.bool_())),
        ("lengths", pa.list_(pa.int32())),
        ("tail_labels", pa.list_(pa.int32())),
        ("documents", pa.list_(pa.int64())),
    ]
)


def checksum(text: str) -> str:
    """Of the metadata's JSON."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_metadata(path: Path) -> dict[str, Any]:
    """The checked metadata of a packed file.

    Raises:
        DataError: Missing, damaged, of another kind or another version.
    """
    return _checked_metadata(path, _open(path)[0])


def _open(path: Path) -> tuple[pa.Schema, pa.RecordBatchFileReader | pq.ParquetFile]:
    if not path.is_file():
        raise DataError(f"{path}: no such packed file.")
    try:
        if path.suffix == ".parquet":
            parquet = pq.ParquetFile(path)
            # Parquet keeps the metadata twice, plainly and inside an encoded Arrow schema; the plain one counts.
            return parquet.schema_arrow.with_metadata(parquet.metadata.metadata), parquet
        return _reading(pa.memory_map(str(path)))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split())
    return DataError(f"{path}: cannot be read as {path.suffix[1:] or 'arrow'} ({reason}); pack it again.")


def _batches(reader: pa.RecordBatchFileReader | pq.ParquetFile) -> list[pa.RecordBatch]:
    """All rows. Their places are checked, which touches no ids: Arrow would end the process at one outside the file."""
    if isinstance(reader, pq.ParquetFile):
        batches = reader.read().to_batches()
    else:
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
    for batch in batches:
        batch.validate(full=True)
    return batches


def _reading(file: pa.NativeFile) -> tuple[pa.Schema, pa.RecordBatchFileReader]:
    reader = pa.ipc.open_file(file)
    return reader.schema, reader


def _checked_metadata(path: Path, schema: pa.Schema) -> dict[str, Any]:
    entries = schema.metadata or {}
    if METADATA_KEY not in entries:
        raise DataError(f"{path}: is no packed file: its schema has no `{METADATA_KEY.decode()}` metadata.")
    try:
        text = entries[METADATA_KEY].decode()
        metadata = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: metadata is damaged ({error}); pack it again.") from error
    if entries.get(CHECKSUM_KEY, b"").decode("latin-1") != checksum(text):
        raise DataError(f"{path}: metadata is damaged (checksum differs); pack it again.")
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise DataError(
            f"{path}: has format {metadata.get('format')} version {metadata.get('version')}; this program reads "
            f"{FORMAT} version {VERSION}. Pack it again, or use the release that wrote it."
        )
    if not schema.remove_metadata().equals(COLUMNS):
        try:
            names = ", ".join(schema.names)
        except UnicodeDecodeError:
            names = "damaged"
        raise DataError(f"{path}: columns are {names}; expected {', '.join(COLUMNS.names)}.")
    return metadata


class PackedFile:
    """Rows of a packed file by number.

    Args:
        path: An `.arrow` or `.parquet` file.
        content: The bytes of an Arrow file, where they are not on disk; `path` is then only a name.

    Raises:
        DataError: Missing, damaged, of another kind or another version.
    """

    def __init__(self, path: str | Path, content: pa.Buffer | None = None) -> None:
        self.path = Path(path)
        schema, reader = _open(self.path) if content is None else _reading(pa.BufferReader(content))
        self.metadata = _checked_metadata(self.path, schema)
        try:
            self._batches = _batches(reader)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(self.path, error) from error
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

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))

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
        return checksum(json.dumps(facts, sort_keys=True))

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
