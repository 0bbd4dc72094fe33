"""Records on their way from files to workers: read in order, unparsed where that can wait, gathered in batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from freight.data.read.jsonl import read_lines
from freight.data.read.readers import read_file
from freight.data.read.records import Place, RawRecord
from freight.data.tokens.batch_encoder import BatchTask, Content, SourceRules

BATCH_RECORDS = 256
BATCH_BYTES = 1 << 20


class Taken(NamedTuple):
    """A record on its way.

    Args:
        file: Index of its file among all files.
        record: As it was read; lines of JSON unparsed.
        position: Bytes of all files up to its end.
    """

    file: int
    record: RawRecord
    position: int


def unparsed(path: Path, kind: str, after: int) -> Iterator[RawRecord]:
    """The records of a file behind one; lines of JSON as they stand, since parsing is the workers' business."""
    if kind != "jsonl":
        return read_file(path, kind, after)
    lines = read_lines(path, after)
    return (RawRecord(Place(path, kind, number), None, None, line, consumed) for number, line, consumed in lines)


def content_of(record: RawRecord) -> Content:
    """What is left to do with a record: nothing, parsing, or refusing it."""
    content = record.value if record.value is not None else record.fault or record.raw
    assert content is not None, "a reader yields a value, a fault or bytes"
    return content


def tasks_of(records: Iterator[Taken], rules: SourceRules, read: int) -> Iterator[tuple[list[Taken], BatchTask]]:
    """Batches of records, each beside the task it makes.

    Args:
        records: Of one source.
        rules: Of that source.
        read: Its records before these.
    """
    for batch in batches(records):
        yield batch, BatchTask(rules, read, [content_of(taken.record) for taken in batch])
        read += len(batch)


def batches(records: Iterator[Taken]) -> Iterator[list[Taken]]:
    """Group records so that neither their number nor their bytes grow large."""
    batch: list[Taken] = []
    size = 0
    for taken in records:
        batch.append(taken)
        size += len(taken.record.raw or b"")
        if len(batch) == BATCH_RECORDS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
