"""Rows of data that are tokenised while the run trains: for sources too large to index, packed by gzip, or far away.

Shards are dealt to data ranks, each reads its own, and documents are shuffled and packed a buffer at a time. While one
buffer is trained on, a thread makes the next. A run resumes exactly, on as many ranks, from the record where its
present buffer begins; nothing is promised about another number of ranks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from freight.config.data_checks import algorithm, pack_size
from freight.config.schema import DataConfig
from freight.data.documents import Document, InMemoryDocuments
from freight.data.load.shard_stream import Lane, Position, StreamedSource
from freight.data.order import Permutation
from freight.data.pack.mixture import Mixture
from freight.data.pack.packing import PackedRows, check_pack_size, pack
from freight.data.pack.rows import IndexedRows, Row, make_row
from freight.data.read.sources import resolve_sources
from freight.data.render.tokenizer import Encoder, pad_id, tokenizer_hash
from freight.data.tokens.batch_encoder import BatchEncoder
from freight.data.tokens.cache_key import cache_key, combined_hash
from freight.data.tokens.tokenise import template_of
from freight.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOWS_KEPT = 3  # the one in use, the next, and one behind for steps still being built; more if they are small
DOCUMENTS_KEPT = 30_000
STARTS_KEPT = 4096


def stream_rows(
    config: DataConfig,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    rejects_dir: Path | None,
    data_ranks: int = 1,
    rank: int = 0,
) -> StreamRows:
    """The rows of `data.train` as a stream.

    Args:
        config: The `data` section.
        seed: Order of shards and documents.
        tokenizer: Of the run, with its chat template.
        vocab_size: The model's; no id may reach it.
        rejects_dir: Where records that cannot be used are listed.
        data_ranks: Ranks that share the shards.
        rank: This one.

    Raises:
        DataError: Data that cannot be used; fewer shards than ranks.
    """
    if config.train is None:
        raise ConfigError("`data.train` is missing. Name a file, a folder or a glob.")
    resolved = resolve_sources(config.train, config)
    template = template_of(tokenizer, config)
    encoder = Encoder(tokenizer)
    encode = BatchEncoder(config, encoder, template, vocab_size)
    suffix = f"-rank{rank}" if data_ranks > 1 else ""
    sources = [StreamedSource(source, config, encode, rejects_dir, suffix) for source in resolved]
    weighted = [source for source in resolved if source.weight is not None]
    groups = [[source] for source in sources] if weighted else [sources]
    sizes = {path: size_of(path) for source in resolved for path in source.files}
    fingerprint = cache_key(resolved, sizes, config, tokenizer, template, vocab_size)
    formats = {source.format for source in sources}
    metadata = {
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "pad_id": pad_id(tokenizer),
        "eos_id": encoder.eos_id,
        "vocab_size": vocab_size,
        "format": formats.pop() if len(formats) == 1 else "mixed",
        "sources": [
            {"name": source.name, "path": source.path, "hash": combined_hash([sizes[path] for path in source.files])}
            for source in resolved
        ],
        "notices": [notice for source in sources for notice in source.notices],
    }
    key = (seed, fingerprint) if config.shuffle else None
    return StreamRows(
        [dealt_lane(group, number, key, data_ranks, rank) for number, group in enumerate(groups)],
        config,
        seed,
        fingerprint=fingerprint,
        metadata=metadata,
        weights={source.name: source.weight for source in resolved if source.weight is not None},
        data_ranks=data_ranks,
    )


def dealt_lane(
    sources: Sequence[StreamedSource], number: int, key: tuple[int, str] | None, data_ranks: int, rank: int
) -> Lane:
    """One rank's share of the shards of some sources.

    Args:
        sources: Their shards follow one another.
        number: Of the lane.
        key: What chooses the order of shards in each pass; None = their own order.
        data_ranks: Ranks that share them.
        rank: This one.

    Raises:
        DataError: There are fewer shards than ranks.
    """
    shards = [(source, path) for source in sources for path in source.source.files]
    if len(shards) < data_ranks:
        names = ", ".join(source.source.path for source in sources)
        raise DataError(
            f"{names}: {len(shards)} shards for {data_ranks} data ranks, and each needs one of its own; split the "
            "files, or leave data.streaming out"
        )

    def order(turn: int) -> Sequence[int]:
        if key is None:
            return range(len(shards))[rank::data_ranks]
        seed, fingerprint = key
        return (
            Permutation(len(shards), (seed, turn, fingerprint, f"shards {number}")).array()[rank::data_ranks].tolist()
        )

    return Lane(shards, order)


def size_of(path: Path) -> str:
    """What stands for a shard's content, which is too much to hash: its size."""
    return f"{path.stat().st_size} bytes" if path.exists() else "on the Hub"


Start = tuple[Position, ...]


@dataclass(frozen=True, eq=False)
class Window:
    """Documents shuffled and packed together.

    Args:
        documents: In the order of reading.
        sources: Name of the source of each.
        order: Places of the documents in the order of packing.
        plan: How they share rows.
    """

    documents: InMemoryDocuments
    sources: list[str]
    order: np.ndarray
    plan: PackedRows


class StreamRows:
    """The rows of endless lanes of shards; see `RowSource`. There is one epoch, and it has no end.

    Args:
        lanes: One, or one for each weight.
        config: The `data` section.
        seed: Order of documents in a window; also of packing, unless it has its own.
        fingerprint: Changes with the data.
        metadata: Facts for reports; `pad_id` and `format` are used here.
        weights: Of each lane, by the name of its source; empty with one lane.
        data_ranks: Ranks that share the shards.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        config: DataConfig,
        seed: int,
        *,
        fingerprint: str,
        metadata: dict[str, Any],
        weights: Mapping[str, float],
        data_ranks: int = 1,
    ) -> None:
        packing = config.packing
        self.pack_size = pack_size(config)
        self.document_multiple = packing.document_multiple if packing else 1
        check_pack_size(self.pack_size, self.document_multiple)
        self.pad_id: int = metadata["pad_id"]
        self.seed = seed
        self.fingerprint = fingerprint
        self.metadata = metadata
        self.dealt_to: int | None = data_ranks
        self._lanes = list(lanes)
        self._mixture = Mixture(list(weights.values()) or [1.0])
        self._weights = dict(weights)
        self._algorithm = algorithm(config, metadata["format"])
        self._packing_seed = seed if packing is None or packing.seed is None else packing.seed
        self._buffer = config.shuffle_buffer
        self._shuffle = config.shuffle
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._windows: OrderedDict[int, Future[Window]] = OrderedDict()
        self._starts: OrderedDict[int, Start] = OrderedDict({0: (Position(),) * len(self._lanes)})
        self._open: tuple[Start, list[Iterator[tuple[Document, str, Position]]]] | None = None

    @property
    def packing(self) -> dict[str, Any]:
        """See `RowSource.packing`."""
        return {
            "algorithm": self._algorithm,
            "pack_size": self.pack_size,
            "seed": self._packing_seed,
            "document_multiple": self.document_multiple,
            "shuffle_buffer": self._buffer,
            "shuffle": self._shuffle,
            **({"weights": self._weights} if self._weights else {}),
        }

    def indexed(self) -> IndexedRows | None:
        """See `RowSource.indexed`: nobody knows how much there is."""
        return None

    def rows_in(self, epoch: int, window: int) -> int:
        """Rows of one window; waits until it has been read."""
        assert epoch == 0, epoch
        return len(self._window(window).plan)

    def row(self, epoch: int, window: int, number: int) -> Row:
        """One row; its documents count from the front of the stream."""
        read = self._window(window)
        spans = [(int(read.order[document]), start, length) for document, start, length in read.plan.row(number)]
        row = make_row(read.documents, spans)
        return replace(row, documents=row.documents + window * self._buffer)

    def epochs_done(self, epoch: int, window: int, row: int) -> float:
        """Passes over the shards of this rank, on average over the lanes."""
        rows = self.rows_in(epoch, window)
        before, behind = (
            sum(position.turn + position.done for position in self._starts[index]) / len(self._lanes)
            for index in (window, window + 1)
        )
        return before + (behind - before) * row / rows

    def source_of(self, document: int) -> str:
        """Name of the source of a document."""
        window, place = divmod(document, self._buffer)
        return self._window(window).sources[place]

    def mark(self, window: int) -> dict[str, Any] | None:
        """Where the documents of a window begin in every lane."""
        return {"lanes": [list(position) for position in self._starts[window]]}

    def return_to(self, window: int, mark: dict[str, Any]) -> None:
        """See `RowSource.return_to`."""
        with self._lock:
            self._windows.clear()
            self._starts = OrderedDict({window: tuple(Position(*position) for position in mark["lanes"])})

    def _window(self, number: int) -> Window:
        """A window, while the next one is being read."""
        with self._lock:
            wanted = self._begin(number)
            self._windows.move_to_end(number)
            self._begin(number + 1)
            while len(self._windows) > max(WINDOWS_KEPT, DOCUMENTS_KEPT // self._buffer):
                self._windows.popitem(last=False)
        return wanted.result()

    def _begin(self, number: int) -> Future[Window]:
        """Read a window in a thread, unless that has been begun."""
        if number not in self._windows:
            future = self._windows[number] = Future()
            # A daemon: when the run ends, nobody waits for documents that nobody will see.
            threading.Thread(
                target=self._fulfil, args=(number, self._windows.get(number - 1), future), daemon=True
            ).start()
        return self._windows[number]

    def _fulfil(self, number: int, before: Future[Window] | None, future: Future[Window]) -> None:
        try:
            if before is not None:
                before.result()
            with self._reading:
                future.set_result(self._read(number))
        except BaseException as error:
            future.set_exception(error)

    def _read(self, number: int) -> Window:
        """Read on where a window begins, and note where the next one does."""
        start = self._starts[number]
        if self._open is None or self._open[0] != start:
            lanes = zip(self._lanes, start, strict=True)
            self._open = start, [lane.documents(position) for lane, position in lanes]
        streams, behind = self._open[1], list(start)
        self._open = None
        documents: list[Document] = []
        sources: list[str] = []
        lanes, _ = self._mixture.at(number * self._buffer + np.arange(self._buffer))
        for lane in lanes.tolist():
            document, source, behind[lane] = next(streams[lane])
            documents.append(document)
            sources.append(source)
        self._starts[number + 1] = tuple(behind)
        if len(self._starts) > STARTS_KEPT:
            self._starts.popitem(last=False)
        self._open = self._starts[number + 1], streams
        return self._packed(number, documents, sources)

    def _packed(self, number: int, documents: list[Document], sources: list[str]) -> Window:
        order = np.arange(len(documents))
        if self._shuffle:
            order = Permutation(len(documents), (self.seed, number, self.fingerprint)).array()
        held = InMemoryDocuments(documents)
        plan = pack(
            held.lengths[order],
            self._algorithm,
            self.pack_size,
            self._packing_seed,
            window=number,
            document_multiple=self.document_multiple,
            shuffle=self._shuffle,
        )
        return Window(held, sources, order, plan)
