"""Endless documents from shards read one after another, each found again by where it stands.

A shard is a file, or an address on the Hub. A lane of shards is passed over again and again; its position after any
document is five numbers, from which a restarted run reads on without tokenising what lies before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from freight.config.schema import DataConfig
from freight.data.documents import Document
from freight.data.read.records import RawRecord
from freight.data.read.rejects import Rejects
from freight.data.read.sources import SourceFiles
from freight.data.render.formats import DETECTION_RECORDS, check_field_names
from freight.data.tokens.batch_encoder import BatchEncoder, EncodedBatch, SourceRules, read_record
from freight.data.tokens.books import SAMPLED_RECORDS, Books, TooLongCount
from freight.data.tokens.record_batches import Taken, content_of, tasks_of, unparsed
from freight.data.tokens.source_rules import enter_outcomes, format_of, policy_of, rejects_of
from freight.errors import DataError


class Position(NamedTuple):
    """A place between two documents of a lane.

    Args:
        turn: Passes over the lane before this one.
        shard: Place in the order of this pass.
        after: Number of the last record of the shard that is behind; -1 if none is.
        taken: Documents behind of the record after it, when a record makes several.
        done: Share of this pass behind; for reports only.
    """

    turn: int = 0
    shard: int = 0
    after: int = -1
    taken: int = 0
    done: float = 0.0


class StreamedSource:
    """One source of a stream: its rules, and the books of what was read of it.

    Args:
        source: Its files.
        config: The `data` section.
        encode: Makes documents of records.
        rejects_dir: Takes the rejects of the first pass.
        suffix: Of the name of the rejects file, where several ranks write one.

    Raises:
        DataError: Its format cannot be told from the first records, or no record has a renamed column.
    """

    def __init__(
        self, source: SourceFiles, config: DataConfig, encode: BatchEncoder, rejects_dir: Path | None, suffix: str
    ) -> None:
        check_field_names(source.fields, source.path)
        self.source = source
        self.notices: list[str] = []
        self._config = config
        self._encode = encode
        self._rejects_name = source.name + suffix
        self._books = Books()
        self._too_long = TooLongCount()
        records = chain.from_iterable(unparsed(path, source.kind, -1) for path in source.files)
        head = list(islice(records, DETECTION_RECORDS))
        self.format = format_of(source, head)
        if source.format == "auto":
            self.notices.append(f"{source.path}: format {self.format} (detected)")
        self._rules = SourceRules(self.format, source.fields, policy_of(config, self.format))
        self._check_keys(head)
        self._rejects = self._new_rejects(rejects_dir)

    def documents(self, path: Path, after: int) -> Iterator[tuple[RawRecord, list[Document]]]:
        """Records of one file behind a place, each with its documents; none for a record that cannot be used.

        Raises:
            DataError: A record, or the file, that ends the run.
        """
        records = (Taken(0, record, record.consumed) for record in unparsed(path, self.source.kind, after))
        for batch, task in tasks_of(records, self._rules, self._rejects.read):
            encoded = self._encode(task)
            self._enter(batch, encoded)
            made = encoded.columns.documents()
            for taken, count in zip(batch, encoded.num_documents, strict=True):
                yield taken.record, list(islice(made, count))

    def end_pass(self, *, whole: bool) -> None:
        """Hold what a whole pass left out against what is allowed, and begin new books.

        Args:
            whole: False for the rest of a pass that an earlier run began: its books are gone.

        Raises:
            DataError: Too much was left out.
        """
        if self._rejects.read and whole:
            self._rejects.finish(self._config.max_skipped_fraction, self.source.path)
        self._rejects.close()
        self._rejects = self._new_rejects(None)

    def _enter(self, batch: Sequence[Taken], encoded: EncodedBatch) -> None:
        rejects = self._rejects
        records = [taken.record for taken in batch]
        enter_outcomes(records, encoded.faults, rejects, self._too_long, self._rules.policy)
        self._too_long.stop(rejects.read, enough=True)
        self._books.counts.add(encoded.counts)
        if self._books.counts.turns >= SAMPLED_RECORDS:
            self._books.check_ends()

    def _check_keys(self, head: list[RawRecord]) -> None:
        ignored, seen = Counter[str](), set[str]()
        for record in head:
            read_record(content_of(record), self._rules, ignored, seen)
        missing = sorted(set(self.source.fields.values()) - seen)
        if missing:
            raise DataError(
                f"{self.source.path}: data.fields: none of the first {len(head)} records has a column {missing[0]!r}; "
                "leave it out"
            )
        if ignored:
            listed = ", ".join(f"{key} ({count:,})" for key, count in ignored.most_common())
            self.notices.append(f"{self.source.path}: keys not used in the first {len(head)} records: {listed}")

    def _new_rejects(self, folder: Path | None) -> Rejects:
        return rejects_of(self._rejects_name, folder, self._config, self._rules.policy)


class Lane:
    """Shards that follow one another, without an end.

    Args:
        shards: Source and file of each.
        order: Shards of a pass, in order, as places in `shards`.
    """

    def __init__(self, shards: Sequence[tuple[StreamedSource, Path]], order: Callable[[int], Sequence[int]]) -> None:
        self._shards = shards
        self._order = order

    def documents(self, position: Position) -> Iterator[tuple[Document, str, Position]]:
        """Documents from a position on, each with the name of its source and the position behind it.

        Raises:
            DataError: Data that cannot be used, or a pass without a document.
        """
        while True:
            found, whole = False, position == Position(position.turn)
            order = self._order(position.turn)
            for place in range(position.shard, len(order)):
                source, path = self._shards[order[place]]
                start = position if place == position.shard else Position(position.turn, place)
                for item in self._of_shard(source, path, start, len(order)):
                    found = True
                    yield item
            for source in {id(source): source for source, _ in self._shards}.values():
                source.end_pass(whole=whole)
            if whole and not found:
                raise DataError(f"0 usable records in the {len(order)} shards of this rank: {self._shards[0][1]}, ...")
            position = Position(position.turn + 1)

    def _of_shard(
        self, source: StreamedSource, path: Path, start: Position, shards: int
    ) -> Iterator[tuple[Document, str, Position]]:
        size = path.stat().st_size if path.exists() else 1
        after, taken = start.after, start.taken
        for record, documents in source.documents(path, start.after):
            done = (start.shard + record.consumed / max(1, size)) / shards
            for number, document in enumerate(documents[taken:], start=taken + 1):
                if number < len(documents):
                    behind = Position(start.turn, start.shard, after, number, done)
                else:
                    behind = Position(start.turn, start.shard, record.place.number, 0, done)
                yield document, source.source.name, behind
            after, taken = record.place.number, 0
