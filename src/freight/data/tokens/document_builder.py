"""Reads sources, has batches encoded, and puts documents into a sink, in order: the loop around the workers.

This process only cuts files into lines, keeps the books and writes; parsing, rendering and tokenising are a batch's
own business, here or in worker processes. Small input stays here, where nothing has to be started.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freight.config.schema import DataConfig
from freight.data.read.records import RawRecord, RecordFault
from freight.data.read.rejects import Rejects
from freight.data.read.sources import SourceFiles
from freight.data.render.formats import DETECTION_RECORDS, check_field_names
from freight.data.render.template import ChatTemplate
from freight.data.render.tokenizer import ROUND_TRIP_STRINGS, Encoder, pad_id, tokenizer_hash
from freight.data.tokens.batch_encoder import BatchEncoder, BatchTask, EncodedBatch, SourceRules, read_record
from freight.data.tokens.books import SAMPLED_RECORDS, Books, Mark, TooLongCount
from freight.data.tokens.cache_key import combined_hash
from freight.data.tokens.record_batches import Taken, content_of, tasks_of, unparsed
from freight.data.tokens.source_rules import enter_outcomes, format_of, policy_of, rejects_of
from freight.data.tokens.token_store import ArrowSink, FileEntry, MemorySink
from freight.data.tokens.worker_pool import WorkerPool, usable_processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int, str], None]

POOL_BYTES = 16 << 20  # below, starting processes takes longer than they save
MOST_PROCESSES = 8
SHARD_BYTES = 64 << 20
NO_RECORD = -1


@dataclass(frozen=True)
class Job:
    """What is to be tokenised, and how.

    Args:
        sources: What to read.
        config: The `data` section.
        tokenizer: Of the run.
        template: Chat template, if any.
        vocab_size: Rows of the model's embedding.
        progress: Told of bytes.
        processes: How many tokenise; None = chosen by size and cores.
    """

    sources: list[SourceFiles]
    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate | None
    vocab_size: int
    progress: Progress
    processes: int | None = None


Runner = Callable[[Iterable[tuple[list[Taken], BatchTask]]], Iterator[tuple[list[Taken], EncodedBatch]]]


@dataclass
class DocumentBuilder:
    """Turns all sources into documents in a sink, and keeps the books.

    Args:
        job: What to do.
        sink: Takes documents.
        rejects_dir: Takes rejects files.
        save: Told after every finished shard what `run` needs to go on behind it; None = shards are not finished.
    """

    job: Job
    sink: ArrowSink | MemorySink
    rejects_dir: Path | None
    save: Callable[[dict[str, Any]], None] | None = None
    books: Books = field(default_factory=Books)
    rejects: dict[str, Rejects] = field(default_factory=dict)
    too_long: TooLongCount = field(default_factory=TooLongCount)

    def run(self, state: dict[str, Any] | None = None) -> None:
        """Tokenise every source, in order.

        Args:
            state: What `save` was given when this build was interrupted; None = from the front.

        Raises:
            DataError: See `tokenise`.
        """
        job = self.job
        sizes = [path.stat().st_size for source in job.sources for path in source.files]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        self.books.missing_columns = {column for source in job.sources for column in source.fields.values()}
        if state is not None:
            self._restore(state)
        self._shard_start, self._began = self.books.mark.position, time.monotonic()
        self._tokens_before, self._read_before = self.books.tokens, self._read()
        self._encoder = Encoder(job.tokenizer)
        encode = BatchEncoder(job.config, self._encoder, job.template, job.vocab_size)
        processes = job.processes or self._suitable_processes()
        if processes > 1:
            with WorkerPool(encode, processes, "tokenising") as pool:
                self._run_sources(pool.map)
        else:
            self._run_sources(lambda tasks: ((batch, encode(task)) for batch, task in tasks))
        self.books.close()

    def metadata(self, hashes: dict[Path, str]) -> dict[str, Any]:
        """Facts for packed files, reports and summaries; see `tokenise`."""
        job = self.job
        template = job.template if any(name != "text" for name in self.books.formats.values()) else None
        return {
            "tokenizer_hash": tokenizer_hash(job.tokenizer),
            "template_hash": template.hash if template else None,
            "vocab_size": job.vocab_size,
            "pad_id": pad_id(job.tokenizer),
            "eos_id": self._encoder.eos_id,
            "sequence_length": job.config.sequence_length,
            "sources": [
                {
                    "name": source.name,
                    "path": source.path,
                    "hash": combined_hash([hashes[path] for path in source.files]),
                    "records": self.rejects[source.name].read,
                }
                for source in job.sources
            ],
            **self.books.summary(self.rejects, self.sink.lengths),
        }

    def _suitable_processes(self) -> int:
        left = self._starts[-1] - self.books.mark.position
        return usable_processes(MOST_PROCESSES) if left >= POOL_BYTES else 1

    def _run_sources(self, runner: Runner) -> None:
        first_file = 0
        for index, source in enumerate(self.job.sources):
            if index >= self.books.mark.source:
                self._run_source(index, source, first_file, runner)
            first_file += len(source.files)

    def _run_source(self, index: int, source: SourceFiles, first_file: int, runner: Runner) -> None:
        config, books = self.job.config, self.books
        check_field_names(source.fields, source.path)
        if books.mark.source != index or books.mark.after == NO_RECORD:
            books.mark = Mark(index, first_file, NO_RECORD, self._starts[first_file])
        fresh = source.name not in books.formats
        before = 0 if fresh else self.rejects[source.name].read
        limit = None if source.max_records is None else max(0, source.max_records - before)
        records = islice(self._records(source, first_file), limit)
        head: list[Taken] = []
        if fresh:
            head = list(islice(records, DETECTION_RECORDS))
            self._open(source, [taken.record for taken in head])
            records = chain(head, records)
        rejects = self.rejects[source.name]
        rules = SourceRules(books.formats[source.name], source.fields, books.policies[source.name])
        try:
            if fresh and index == 0:
                self._check_round_trip([taken.record for taken in head], rules)
            for batch, encoded in runner(tasks_of(records, rules, rejects.read)):
                self._take(index, batch, encoded, rejects)
            self.too_long.stop(rejects.read, enough=True)
            books.check_ends()
            rejects.finish(config.max_skipped_fraction, source.path)
        finally:
            rejects.close()
        stop = first_file + len(source.files)
        books.mark = Mark(index + 1, stop, NO_RECORD, self._starts[stop])
        self._report()

    def _records(self, source: SourceFiles, first_file: int) -> Iterator[Taken]:
        mark = self.books.mark
        for file, path in enumerate(source.files, start=first_file):
            if file < mark.file:
                continue
            after = mark.after if file == mark.file else NO_RECORD
            for record in unparsed(path, source.kind, after):
                yield Taken(file, record, self._starts[file] + record.consumed)

    def _open(self, source: SourceFiles, head: list[RawRecord]) -> None:
        """Begin the books of a source."""
        books, config = self.books, self.job.config
        found = format_of(source, head)
        if source.format == "auto":
            books.notices.append(f"{source.path}: format {found} (detected)")
        books.files += [FileEntry(str(path), source.kind, source.name) for path in source.files]
        books.formats[source.name] = found
        books.policies[source.name] = policy_of(config, found)
        self.rejects[source.name] = rejects_of(source.name, self.rejects_dir, config, books.policies[source.name])
        self.too_long = TooLongCount()

    def _check_round_trip(self, head: list[RawRecord], rules: SourceRules) -> None:
        samples = [read_record(content_of(record), rules, Counter(), set()) for record in head]
        texts = [text for sample in samples if not isinstance(sample, RecordFault) for text in sample.texts]
        warning = self._encoder.round_trip_warning(texts[:ROUND_TRIP_STRINGS])
        if warning:
            self.books.warnings.append(warning)

    def _take(self, index: int, batch: list[Taken], encoded: EncodedBatch, rejects: Rejects) -> None:
        """Enter a batch into the books and hand its documents on."""
        books = self.books
        books.counts.add(encoded.counts)
        books.ignored.update(encoded.ignored)
        books.missing_columns -= encoded.columns_seen
        policy = books.policies[self.job.sources[index].name]
        enter_outcomes([taken.record for taken in batch], encoded.faults, rejects, self.too_long, policy)
        owners = [taken for taken, count in zip(batch, encoded.num_documents, strict=True) for _ in range(count)]
        columns = encoded.columns
        self.sink.add(columns, [taken.file for taken in owners], [taken.record.place for taken in owners])
        books.documents += len(columns.lengths)
        books.tokens += len(columns.ids)
        books.targets += columns.targets
        enough = rejects.read >= SAMPLED_RECORDS
        self.too_long.stop(rejects.read, enough=enough)
        if enough:
            books.check_ends()
        last = batch[-1]
        books.mark = Mark(index, last.file, last.record.place.number, last.position)
        self._report()
        if self.save is not None and last.position - self._shard_start >= SHARD_BYTES:
            self._finish_shard(self.save)

    def _finish_shard(self, save: Callable[[dict[str, Any]], None]) -> None:
        assert isinstance(self.sink, ArrowSink)
        self.sink.finish_shard()
        self._shard_start = self.books.mark.position
        save(
            {
                "shards": self.sink.shards,
                "books": self.books.as_json(),
                "rejects": {name: rejects.state() for name, rejects in self.rejects.items()},
                "too_long": asdict(self.too_long),
            }
        )

    def _restore(self, state: dict[str, Any]) -> None:
        self.books = Books.from_json(state["books"])
        self.too_long = TooLongCount(**state["too_long"])
        for source in self.job.sources:
            if source.name in state["rejects"]:
                policy = self.books.policies[source.name]
                rejects = self.rejects[source.name] = rejects_of(source.name, self.rejects_dir, self.job.config, policy)
                rejects.resume(state["rejects"][source.name])

    def _read(self) -> int:
        return sum(rejects.read for rejects in self.rejects.values())

    def _report(self) -> None:
        """Bytes done of all; and records and tokens a second, and records left out so far."""
        seconds = max(1e-9, time.monotonic() - self._began)
        read, tokens = self._read(), self.books.tokens
        left_out = read - sum(rejects.used for rejects in self.rejects.values())
        words = f"{(read - self._read_before) / seconds:,.0f} records/s, "
        words += f"{(tokens - self._tokens_before) / seconds:,.0f} tokens/s, {left_out:,} left out"
        self.job.progress(self.books.mark.position, self._starts[-1], f"tokenising: {words}")
