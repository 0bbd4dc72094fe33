"""What is settled for a source before its records are used, and what becomes of the bad ones.

The same whether a source is tokenised once into the cache or streamed while the run trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from freight.config.schema import DataConfig, Truncation
from freight.data.read.records import RawRecord, RecordFault
from freight.data.read.rejects import Rejects
from freight.data.read.sources import SourceFiles
from freight.data.render.formats import detect_format, rename_fields
from freight.data.render.truncation import TooLong
from freight.data.tokens.batch_encoder import parse_record
from freight.data.tokens.books import TooLongCount
from freight.data.tokens.record_batches import content_of
from freight.errors import DataError


def format_of(source: SourceFiles, head: Sequence[RawRecord]) -> str:
    """The format of a source's records: as configured, or told from the first of them.

    Args:
        source: Whose.
        head: Its first records.

    Raises:
        DataError: There is no record, none can be parsed, or they share no format.
    """
    if source.format == "packed":
        raise DataError(f"{source.path}: format packed: set data.packing.file to the packed file instead")
    if source.format != "auto":
        return source.format
    if not head:
        raise DataError(f"{source.path}: 0 records; the source is empty")
    parsed, faults = [], []
    for record in head:
        try:
            parsed.append((record.place, rename_fields(parse_record(content_of(record)), source.fields)))
        except RecordFault as fault:
            faults.append(fault)
    if not parsed:
        raise DataError(f"{head[0].place}: {faults[0]}; none of the first {len(head)} records can be parsed")
    return detect_format(parsed, source.path)


def policy_of(config: DataConfig, record_format: str) -> Truncation:
    """`data.truncation`, by default chosen by the format."""
    return config.truncation or ("split" if record_format == "text" else "error")


def rejects_of(name: str, folder: Path | None, config: DataConfig, policy: Truncation) -> Rejects:
    """Takes the bad records of a source; none are listed where the first one ends the run.

    Args:
        name: Of the rejects file.
        folder: Where it is written; None = they are only counted.
        config: Says whether bad records are skipped.
        policy: Truncation of the source.
    """
    skip = config.on_bad_record == "skip"
    stops = policy == "error" and not skip
    return Rejects(name, None if stops else folder, skip=skip)


def enter_outcomes(
    records: Sequence[RawRecord],
    faults: Mapping[int, RecordFault],
    rejects: Rejects,
    too_long: TooLongCount,
    policy: Truncation,
) -> None:
    """Count every record of a batch as used, too long or bad.

    Args:
        records: Of the batch.
        faults: By place in it; see `EncodedBatch`.
        rejects: Of the source.
        too_long: Of the source; told of records that its policy makes an error.
        policy: Truncation of the source.

    Raises:
        DataError: A bad record, where they are not skipped.
    """
    for place, record in enumerate(records):
        fault = faults.get(place)
        if fault is None:
            rejects.accept()
        elif isinstance(fault, TooLong):
            if policy == "error":
                too_long.add(record, fault)
            rejects.drop(record, fault, fault.tokens)
        else:
            rejects.reject(record, fault)
