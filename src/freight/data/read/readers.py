"""Which reader a file gets, and the readers of tables and plain text.

Every reader yields records in the order of the file and can start after any of them, so that a long pass over files
can be taken up where it stopped. What is passed over is not parsed, and whole row groups of Parquet are not even read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from freight.data.read.compressed import BUFFER_BYTES
from freight.data.read.hub import read_hub_shard
from freight.data.read.jsonl import decode_utf8, read_json_array, read_jsonl, without_mark
from freight.data.read.records import Place, RawRecord, RecordFault
from freight.errors import DataError

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
}
TEXT_RECORDS = ("line", "paragraph")
TABLE_ROWS = 256


def read_file(path: Path, kind: str, after: int = -1) -> Iterator[RawRecord]:
    """Yield the records of one file, in order.

    Args:
        path: The file.
        kind: One of the values of `KINDS`, of `TEXT_RECORDS`, or `hub`.
        after: Records whose place has this number or a smaller one are passed over.

    Raises:
        DataError: The file cannot be read at all.
    """
    match kind:
        case "jsonl":
            return read_jsonl(path, after)
        case "json":
            return (record for record in read_json_array(path) if record.place.number > after)
        case "parquet":
            return read_parquet(path, after)
        case "arrow":
            return read_arrow(path, after)
        case "hub":
            return read_hub_shard(path, after)
        case "text":
            return read_text(path, after)
        case "line":
            return read_text_lines(path, after)
        case "paragraph":
            return read_paragraphs(path, after)
        case _:
            raise AssertionError(kind)


def read_parquet(path: Path, after: int = -1) -> Iterator[RawRecord]:
    """Yield every row of a Parquet file as an object; a null column counts as a missing key."""
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            first, skipped = 0, 0
            while first < len(sizes) and skipped + sizes[first] <= after:
                skipped += sizes[first]
                first += 1
            batches = file.iter_batches(batch_size=TABLE_ROWS, row_groups=list(range(first, len(sizes))))
            yield from rows_of(path, "parquet", batches, skipped, sum(sizes), after)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from None


def read_arrow(path: Path, after: int = -1) -> Iterator[RawRecord]:
    """Yield every row of an Arrow file, in the stream or the file form; a null column counts as a missing key."""
    try:
        with pa.memory_map(str(path)) as mapped:
            batches = arrow_batches(mapped)
            pieces = (
                batch.slice(start, TABLE_ROWS) for batch in batches for start in range(0, batch.num_rows, TABLE_ROWS)
            )
            yield from rows_of(path, "arrow", pieces, 0, sum(batch.num_rows for batch in batches), after)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Arrow file: {str(error).splitlines()[0]}") from None


def arrow_batches(mapped: pa.MemoryMappedFile) -> list[pa.RecordBatch]:
    """The batches of a mapped Arrow file; only their places are in memory."""
    try:
        reader = pa.ipc.open_file(mapped)
    except pa.ArrowInvalid:
        mapped.seek(0)
        return list(pa.ipc.open_stream(mapped))
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def rows_of(
    path: Path, kind: str, batches: Iterator[pa.RecordBatch], number: int, total: int, after: int
) -> Iterator[RawRecord]:
    """Rows of a table as records.

    Args:
        path: The file.
        kind: Its kind.
        batches: The table from row `number` on.
        number: Rows before the first batch.
        total: Rows of the file.
        after: Rows up to this one are passed over.
    """
    size = path.stat().st_size
    for batch in batches:
        passed = min(max(after - number, 0), batch.num_rows)
        number += passed
        for row in batch.slice(passed).to_pylist():
            number += 1
            yield RawRecord(Place(path, kind, number), without_nulls(row), None, None, size * number // total)


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the columns that hold nothing in it."""
    return {key: item for key, item in row.items() if item is not None}


def read_text(path: Path, after: int = -1) -> Iterator[RawRecord]:
    """Yield a text file as one record with the key `text`."""
    if after < 1:
        content = path.read_bytes()
        yield text_record(Place(path, "text", 1), content, without_mark(content, path), len(content))


def read_text_lines(path: Path, after: int = -1) -> Iterator[RawRecord]:
    """Yield every line of a text file that is not blank, without its end, as a record with the key `text`."""
    for start, line in _lines_with_start(path):
        stripped = line.rstrip(b"\r\n")
        if start > after and stripped.strip():
            yield text_record(Place(path, "line", start, start + len(stripped)), stripped, stripped, start + len(line))


def read_paragraphs(path: Path, after: int = -1) -> Iterator[RawRecord]:
    """Yield the parts of a text file that blank lines part, without their last line end."""
    gathered: list[bytes] = []
    first = 0
    for start, line in _lines_with_start(path):
        if line.strip():
            first = first if gathered else start
            gathered.append(line)
        elif gathered:
            yield from _paragraph(path, first, gathered, after)
            gathered = []
    if gathered:
        yield from _paragraph(path, first, gathered, after)


def _paragraph(path: Path, start: int, lines: list[bytes], after: int) -> Iterator[RawRecord]:
    content = b"".join(lines)
    stripped = content.rstrip(b"\r\n")
    if start > after:
        place = Place(path, "paragraph", start, start + len(stripped))
        yield text_record(place, stripped, stripped, start + len(content))


def _lines_with_start(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with the byte they begin at, a byte-order mark left out of the first."""
    position = 0
    with path.open("rb", buffering=BUFFER_BYTES) as file:
        for line in file:
            content = line if position else without_mark(line, path)
            yield position + len(line) - len(content), content
            position += len(line)


def text_record(place: Place, raw: bytes, content: bytes, consumed: int) -> RawRecord:
    """A record with the key `text`, or with the fault of its bytes."""
    try:
        return RawRecord(place, {"text": decode_utf8(content)}, None, raw, consumed)
    except RecordFault as fault:
        return RawRecord(place, None, fault, raw, consumed)
