"""Reads, converts and encodes sources into a sink, batch by batch, and keeps the books that must add up."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from freight.config.schema import DataConfig, Truncation
from freight.data.cache_key import combined_hash
from freight.data.documents import Document
from freight.data.encode import EncodeCounts, SampleEncoder
from freight.data.formats import DETECTION_RECORDS, Sample, check_field_names, convert, detect_format, rename_fields
from freight.data.readers import read_file
from freight.data.records import RawRecord, RecordFault
from freight.data.rejects import Rejects
from freight.data.sources import SourceFiles
from freight.data.template import ChatTemplate
from freight.data.token_store import ArrowSink, FileEntry, MemorySink
from freight.data.tokenizer import ROUND_TRIP_STRINGS, Encoder, pad_id, tokenizer_hash
from freight.data.truncation import TooLong
from freight.errors import DataError

Progress = Callable[[int, int, str], None]

BATCH_RECORDS = 256
BATCH_BYTES = 4 << 20
SAMPLED_RECORDS = 1000
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
STRADDLING_LIMIT = 0.001


@dataclass(frozen=True)
class Job:
    """What is to be tokenised, and how."""

    sources: list[SourceFiles]
    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate | None
    vocab_size: int
    progress: Progress


@dataclass
class DocumentBuilder:
    """Reads, converts and encodes all sources into a sink, and keeps the books.

    Args:
        job: What to do.
        sink: Takes documents.
        rejects_dir: Takes rejects files.
    """

    job: Job
    sink: ArrowSink | MemorySink
    rejects_dir: Path | None
    files: list[FileEntry] = field(default_factory=list)
    formats: dict[str, str] = field(default_factory=dict)
    policies: dict[str, str] = field(default_factory=dict)
    rejects: dict[str, Rejects] = field(default_factory=dict)
    counts: EncodeCounts = field(default_factory=EncodeCounts)
    ignored: Counter[str] = field(default_factory=Counter)
    lengths: array[int] = field(default_factory=lambda: array("q"))
    targets: int = 0
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    missing_columns: set[str] = field(default_factory=set)
    done_bytes: int = 0
    position: int = 0

    def run(self) -> None:
        """Tokenise every source, in order.

        Raises:
            DataError: See `tokenise`.
        """
        self.encoder = Encoder(self.job.tokenizer)
        self.total_bytes = sum(path.stat().st_size for source in self.job.sources for path in source.files)
        self.missing_columns = {column for source in self.job.sources for column in source.fields.values()}
        for source in self.job.sources:
            self._run_source(source)
        if self.missing_columns:
            raise DataError(f"data.fields: no record has a column {min(self.missing_columns)!r}; leave it out")
        self._warn()

    def _run_source(self, source: SourceFiles) -> None:
        job, config = self.job, self.job.config
        check_field_names(source.fields, source.path)
        first_file = len(self.files)
        self.files += [FileEntry(str(path), source.kind, source.name) for path in source.files]
        records = islice(self._records(source, first_file), source.max_records)
        head = list(islice(records, DETECTION_RECORDS))
        record_format = self._format(source, [record for _, record in head])
        policy: Truncation = config.truncation or ("split" if record_format == "text" else "error")
        self.formats[source.name], self.policies[source.name] = record_format, policy
        skip = config.on_bad_record == "skip"
        rejects = Rejects(source.name, None if policy == "error" and not skip else self.rejects_dir, skip=skip)
        self.rejects[source.name] = rejects
        encoder = SampleEncoder(config, self.encoder, job.template, policy, job.vocab_size, self.counts)
        too_long = TooLongCount(config.sequence_length) if policy == "error" else None
        try:
            for batch in batches(chain(head, records)):
                self._run_batch(batch, source, encoder, rejects, too_long)
                job.progress(self.position, self.total_bytes, "tokenising")
            if too_long:
                too_long.stop(rejects.read, enough=True)
            self._check_ends()
            rejects.finish(config.max_skipped_fraction, source.path)
        finally:
            rejects.close()

    def _records(self, source: SourceFiles, first_file: int) -> Iterator[tuple[int, RawRecord]]:
        for index, path in enumerate(source.files):
            for record in read_file(path, source.kind):
                self.position = self.done_bytes + record.consumed
                yield first_file + index, record
            self.done_bytes += path.stat().st_size

    def _format(self, source: SourceFiles, head: list[RawRecord]) -> str:
        if source.format == "packed":
            raise DataError(f"{source.path}: format packed: set data.packing.file to the packed file instead")
        if source.format != "auto":
            return source.format
        if not head:
            raise DataError(f"{source.path}: 0 records; the source is empty")
        parsed = [(r.place, rename_fields(r.value, source.fields)) for r in head if r.value is not None]
        if not parsed:
            raise DataError(f"{head[0].place}: {head[0].fault}; none of the first {len(head)} records can be parsed")
        found = detect_format(parsed, source.path)
        self.notices.append(f"{source.path}: format {found} (detected)")
        return found

    def _run_batch(
        self,
        batch: list[tuple[int, RawRecord]],
        source: SourceFiles,
        encoder: SampleEncoder,
        rejects: Rejects,
        too_long: TooLongCount | None,
    ) -> None:
        samples = [self._convert(record, source) for _, record in batch]
        good = [sample for sample in samples if not isinstance(sample, RecordFault)]
        if len(self.lengths) == 0 and good:
            self._check_round_trip(good)
        encoded = iter(encoder.encode(good))
        for (file, record), sample in zip(batch, samples, strict=True):
            result = sample if isinstance(sample, RecordFault) else next(encoded)
            if isinstance(result, TooLong):
                if too_long:
                    too_long.add(record, result)
                rejects.drop(record, result, result.tokens)
            elif isinstance(result, RecordFault):
                rejects.reject(record, result)
            else:
                rejects.accept()
                for document in result:
                    self._add(document, file, record)
        enough = rejects.read >= SAMPLED_RECORDS
        if too_long:
            too_long.stop(rejects.read, enough=enough)
        if enough:
            self._check_ends()

    def _convert(self, record: RawRecord, source: SourceFiles) -> Sample | RecordFault:
        if record.value is None:
            assert record.fault is not None
            return record.fault
        self.missing_columns -= record.value.keys()
        keys: list[str] = []
        try:
            sample = convert(rename_fields(record.value, source.fields), self.formats[source.name], keys.append)
        except RecordFault as fault:
            return fault
        self.ignored.update(set(keys))
        return sample

    def _add(self, document: Document, file: int, record: RawRecord) -> None:
        self.sink.add(document, file, record.place)
        self.lengths.append(len(document))
        self.targets += document.num_targets

    def _check_round_trip(self, samples: list[Sample]) -> None:
        warning = self.encoder.round_trip_warning([text for s in samples[:ROUND_TRIP_STRINGS] for text in s.texts])
        if warning:
            self.warnings.append(warning)

    def _check_ends(self) -> None:
        if self.counts.turns and not self.counts.ended_turns:
            raise DataError(
                "no assistant turn ends in a special token: the model would never learn to stop; add {{ eos_token }} "
                "to the chat template, or set data.eos=always"
            )

    def _warn(self) -> None:
        counts, tokens = self.counts, sum(self.lengths)
        if counts.straddling_tokens > STRADDLING_LIMIT * tokens:
            self.warnings.append(
                f"{counts.straddling_tokens:,} of {tokens:,} tokens cover supervised and other text, such as "
                f"{counts.straddling_example!r}; they are supervised"
            )
        if self.ignored:
            listed = ", ".join(f"{key} ({count:,})" for key, count in self.ignored.most_common())
            self.notices.append(f"keys that are not used: {listed}")

    def metadata(self, hashes: dict[Path, str]) -> dict[str, Any]:
        """Facts for packed files, reports and summaries; see `tokenise`."""
        job, counts = self.job, self.counts
        skipped: Counter[str] = Counter()
        for rejects in self.rejects.values():
            skipped.update(rejects.counts)
        tokens = sum(self.lengths)
        template = job.template if any(name != "text" for name in self.formats.values()) else None
        return {
            "tokenizer_hash": tokenizer_hash(job.tokenizer),
            "template_hash": template.hash if template else None,
            "vocab_size": job.vocab_size,
            "pad_id": pad_id(job.tokenizer),
            "eos_id": self.encoder.eos_id,
            "format": only_value(self.formats),
            "sequence_length": job.config.sequence_length,
            "truncation": only_value(self.policies),
            "sources": [
                {
                    "name": source.name,
                    "path": source.path,
                    "hash": combined_hash([hashes[path] for path in source.files]),
                    "records": self.rejects[source.name].read,
                }
                for source in job.sources
            ],
            "num_documents": len(self.lengths),
            "num_tokens": tokens,
            "num_target_tokens": self.targets,
            "records_read": sum(rejects.read for rejects in self.rejects.values()),
            "records_used": sum(rejects.used for rejects in self.rejects.values()),
            "skipped": dict(skipped),
            "supervised_share": self.targets / max(1, tokens),
            "length_quantiles": {
                str(q): int(v) for q, v in zip(QUANTILES, np.quantile(self.lengths, QUANTILES), strict=True)
            },
            "straddling_tokens": counts.straddling_tokens,
            "trailing_unsupervised": counts.trailing_unsupervised,
            "documents_cut": counts.documents_cut,
            "tokens_cut": counts.tokens_cut,
            "tokens_dropped": sum(rejects.dropped_tokens for rejects in self.rejects.values()),
            "ignored_keys": dict(self.ignored),
            "notices": self.notices,
            "warnings": self.warnings,
        }


class TooLongCount:
    """With truncation `error`: counts documents that are too long until it can say how common they are.

    Args:
        limit: `data.sequence_length`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._first: tuple[RawRecord, TooLong] | None = None
        self._count = 0
        self._longest = 0

    def add(self, record: RawRecord, fault: TooLong) -> None:
        """Count one."""
        self._first = self._first or (record, fault)
        self._count += 1
        self._longest = max(self._longest, fault.tokens)

    def stop(self, read: int, *, enough: bool) -> None:
        """Raise if there was one and enough records were read.

        Raises:
            DataError: Names the first, how common they are, and what to set.
        """
        if self._first is None or not enough:
            return
        record, fault = self._first
        fitting = 1 << (self._longest - 1).bit_length()
        raise DataError(
            f"{record.place}: {fault} ({self._count:,} of the first {read:,} records are). "
            f"Set data.truncation=drop or cut_right, or data.sequence_length={fitting}"
        )


def batches(records: Iterator[tuple[int, RawRecord]]) -> Iterator[list[tuple[int, RawRecord]]]:
    """Group records so that neither their number nor their bytes grow large."""
    batch: list[tuple[int, RawRecord]] = []
    size = 0
    for file, record in records:
        batch.append((file, record))
        size += len(record.raw or b"")
        if len(batch) == BATCH_RECORDS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def only_value(values: dict[str, str]) -> str:
    """The value that all sources share, or `mixed`."""
    distinct = set(values.values())
    return distinct.pop() if len(distinct) == 1 else "mixed"
