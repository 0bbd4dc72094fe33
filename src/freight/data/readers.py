"""Which reader a file gets, and the readers of Parquet and plain text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from freight.data.jsonl import decode_utf8, read_json_array, read_jsonl, without_mark
from freight.data.records import Place, RawRecord, RecordFault
from freight.errors import DataError

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
PARQUET_BATCH_ROWS = 256


def read_file(path: Path, kind: str) -> Iterator[RawRecord]:
    """Yield the records of one file, in order.

    Args:
        path: The file.
        kind: One of the values of `KINDS`.

    Raises:
        DataError: The file cannot be read at all.
    """
    match kind:
        case "jsonl":
            return read_jsonl(path)
        case "json":
            return read_json_array(path)
        case "parquet":
            return read_parquet(path)
        case "text":
            return read_text(path)
        case _:
            raise AssertionError(kind)


def read_parquet(path: Path) -> Iterator[RawRecord]:
    """Yield every row of a Parquet file as an object; a null column counts as a missing key."""
    size = path.stat().st_size
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            rows = max(1, file.metadata.num_rows)
            number = 0
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    value = {key: item for key, item in row.items() if item is not None}
                    yield RawRecord(Place(path, "parquet", number), value, None, None, size * number // rows)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from None


def read_text(path: Path) -> Iterator[RawRecord]:
    """Yield a text file as one record with the key `text`."""
    content = path.read_bytes()
    place = Place(path, "text", 1)
    try:
        value, fault = {"text": decode_utf8(without_mark(content, path))}, None
    except RecordFault as error:
        value, fault = None, error
    yield RawRecord(place, value, fault, content, len(content))
