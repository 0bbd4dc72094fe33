"""Steps of microbatches, in an order that ranks, workers and restarts cannot change.

Rows have global positions 0, 1, 2, ... over all epochs. A step takes a contiguous range of them; inside it the row at
offset i belongs to data rank `i % data_ranks`. So the documents of a step do not depend on the number of ranks, and the
whole state is one position. Workers are threads: building a batch is NumPy copying, which needs no second process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from freight.data.load.microbatch import build_microbatch
from freight.data.load.step_plan import Cursor, StepPlan, StepPlanner
from freight.data.pack.rows import RowSource
from freight.errors import CheckpointError, ConfigError, DataError
from freight.ops.batch import TokenBatch

STATE_VERSION = 1
SOURCES_IN_STATE = 8


@dataclass(frozen=True, eq=False)
class StepData:
    """One optimizer step of one data rank.

    Args:
        step: Number of the step, from 0.
        microbatches: The same number on every rank.
        num_targets: Labels on this rank.
        num_tokens: Real tokens on this rank.
        num_documents: Spans on this rank.
        epoch: Epochs consumed when the step is done: 1.25 = a quarter of the second.
        global_targets: Labels on all data ranks; None where only a collective can tell, since no rank sees all rows.
    """

    step: int
    microbatches: list[TokenBatch]
    num_targets: int
    num_tokens: int
    num_documents: int
    epoch: float
    global_targets: int | None

    @property
    def efficiency(self) -> float:
        """Real tokens over tokens computed."""
        return self.num_tokens / sum(batch.tokens for batch in self.microbatches)


class StepLoader:
    """Iterates `StepData`; give either `epochs` or `steps`.

    With `epochs`, each epoch ends in a short step, or drops its tail. With `steps`, a step may reach into the next
    epoch, unless tails are dropped. Slots without a row are padding without labels.

    Args:
        rows: The rows.
        rows_per_step: Rows of an optimizer step over all ranks.
        micro_batch_tokens: Tokens of a microbatch; a multiple of the rows' pack size.
        seed: Put on every batch, for everything random inside the model.
        drop_last: Leave out the rows at the end of an epoch that do not fill a step.
        data_ranks: Ranks that read different rows.
        rank: This one.
        num_workers: Threads that build batches; 0 = in the caller's. Results are identical.
        prefetch_batches: Steps built ahead, by all threads together.
        epochs: Passes over the data; a fraction takes that share of the last epoch's rows.
        steps: Optimizer steps in all.
        pad_rows: Every microbatch has exactly `micro_batch_tokens` tokens.

    Raises:
        ConfigError: `micro_batch_tokens` does not fit, or there would be no step.
    """

    def __init__(
        self,
        rows: RowSource,
        *,
        rows_per_step: int,
        micro_batch_tokens: int,
        seed: int = 0,
        drop_last: bool = False,
        data_ranks: int = 1,
        rank: int = 0,
        num_workers: int = 0,
        prefetch_batches: int = 2,
        epochs: float | None = None,
        steps: int | None = None,
        pad_rows: bool = True,
    ) -> None:
        check_micro_batch_tokens(micro_batch_tokens, rows.pack_size)
        self._rows = rows
        self._rows_per_step = rows_per_step
        self._rows_per_microbatch = micro_batch_tokens // rows.pack_size
        self._seed = seed
        self._data_ranks = data_ranks
        self._rank = rank
        self._num_workers = num_workers
        self._prefetch_batches = prefetch_batches
        self._pad_rows = pad_rows
        self._dealt = rows.dealt_to is not None
        assert rows.dealt_to in (None, data_ranks), (rows.dealt_to, data_ranks)
        share = len(range(rank, rows_per_step, data_ranks)) if self._dealt else rows_per_step
        self._planner = StepPlanner(rows, share, drop_last=drop_last, epochs=epochs, steps=steps)
        self._cursor = Cursor()
        if drop_last and not self.steps_per_epoch:
            raise ConfigError(
                f"0 steps per epoch: {self._planner.rows_taken(0):,} rows, global batch {rows_per_step:,} and "
                "`data.drop_last`. Lower the global batch or set data.drop_last=false."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch; later ones may differ by a few, since they are packed anew."""
        return self._planner.steps_in(0)

    @property
    def total_steps(self) -> int:
        """Steps from the very first to the last, whatever was resumed. With `epochs`, packs every epoch to count."""
        return self._planner.total_steps

    def __iter__(self) -> Iterator[StepData]:
        """Steps from the present state on; the state moves when a step is handed out."""
        plans = self._planner.plans(self._cursor)
        built = map(self._build, plans) if not self._num_workers else self._prefetched(plans)
        for data, after, tokens in built:
            self._cursor = replace(after, consumed_tokens=self._cursor.consumed_tokens + tokens)
            yield data

    def state_dict(self) -> dict[str, Any]:
        """State after the last step handed out: a few hundred bytes.

        It is the same on every rank, unless each reads shards of its own: then `joined_state` makes one of all.
        """
        return {
            "version": STATE_VERSION,
            "fingerprint": self._rows.fingerprint,
            "seed": self._rows.seed,
            "rows_per_step": self._rows_per_step,
            "packing": self._rows.packing,
            "sources": self._sources(),
            "dealt_to": self._rows.dealt_to,
            "mark": self._rows.mark(self._cursor.window),
            **asdict(self._cursor),
        }

    def load_state_dict(self, state: dict[str, Any], *, allow_changed: bool = False) -> list[str]:
        """Continue from a state.

        Args:
            state: From `state_dict`, of a run with any number of workers and data ranks.
            allow_changed: Accept other data or packing; the order then restarts at the present epoch.

        Returns:
            Sentences to tell the user.

        Raises:
            CheckpointError: A state of another version.
            DataError: Data, seed or packing have changed, or shards were dealt to another number of ranks.
        """
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"loader state has version {state.get('version')}, this program reads {STATE_VERSION}; "
                "resume with the release that wrote it."
            )
        dealt_to = state.get("dealt_to")
        if dealt_to != self._rows.dealt_to and None not in (dealt_to, self._rows.dealt_to):
            raise DataError(
                f"the shards of the stream were dealt to {dealt_to} data ranks, now there are {self._data_ranks}: what "
                f"each has read cannot be dealt anew. Resume on {dealt_to} data ranks."
            )
        if "ranks" in state:
            state = state["ranks"][self._rank]
        cursor = Cursor(**{name: state[name] for name in asdict(Cursor())})
        notices = []
        changes = self._changes(state)
        if changes and not allow_changed:
            raise DataError(
                f"data changed since step {cursor.step}: {'; '.join(changes)}. Undo the change, or set "
                "data.allow_changed=true to restart the order at the present epoch."
            )
        if changes:
            cursor = replace(cursor, window=0, row=0, epoch_rows=0)
            notices.append(f"data changed: {'; '.join(changes)}; epoch {cursor.epoch} restarts")
        elif state.get("mark") is not None:
            self._rows.return_to(cursor.window, state["mark"])
        if state["rows_per_step"] != self._rows_per_step:
            notices.append(
                f"global batch changed from {state['rows_per_step']} to {self._rows_per_step} rows; continues after "
                f"{cursor.consumed_samples:,} rows"
            )
        self._cursor = cursor
        return notices

    def _changes(self, state: dict[str, Any]) -> list[str]:
        changes = []
        before, now = state["packing"], self._rows.packing
        changes += [
            f"packing {key} {before.get(key)} -> {now.get(key)}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if state["seed"] != self._rows.seed:
            changes.append(f"data.seed {state['seed']} -> {self._rows.seed}")
        if state["fingerprint"] != self._rows.fingerprint:
            before, now = state["sources"], self._sources()
            files = [
                f"{path} (hash {before.get(path, 'none')} -> {now.get(path, 'none')})"
                for path in sorted(before.keys() | now.keys())
                if before.get(path) != now.get(path)
            ]
            changes += files or [f"fingerprint {state['fingerprint'][:8]} -> {self._rows.fingerprint[:8]}"]
        return changes

    def _sources(self) -> dict[str, str]:
        sources = self._rows.metadata.get("sources", [])[:SOURCES_IN_STATE]
        return {str(source["path"]): str(source["hash"])[:8] for source in sources}

    def _prefetched(self, plans: Iterator[StepPlan]) -> Iterator[tuple[StepData, Cursor, int]]:
        """Steps built by threads ahead of use, in order; what a thread raises is raised here."""
        waiting: deque[Future[tuple[StepData, Cursor, int]]] = deque()
        with ThreadPoolExecutor(self._num_workers, "freight-loader") as pool:
            try:
                for plan in plans:
                    waiting.append(pool.submit(self._build, plan))
                    if len(waiting) > self._prefetch_batches:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _build(self, plan: StepPlan) -> tuple[StepData, Cursor, int]:
        """This rank's microbatches of a step, where the data stand after it, and its real tokens over all ranks.

        Every rank reads all rows of the step, to know the global counts without a collective; but of a source that was
        dealt to the ranks it has and counts its own only.
        """
        rows = [self._rows.row(*name) for name in plan.rows]
        mine = rows if self._dealt else rows[self._rank :: self._data_ranks]
        slots = -(-(self._rows_per_step if self._dealt else len(rows)) // self._data_ranks)
        batches = [
            build_microbatch(
                mine[first : first + self._rows_per_microbatch],
                num_rows=self._rows_per_microbatch,
                pack_size=self._rows.pack_size,
                document_multiple=self._rows.document_multiple,
                pad_id=self._rows.pad_id,
                pad_rows=self._pad_rows,
                seed=self._seed,
                step=plan.step,
                microbatch=number * self._data_ranks + self._rank,
            )
            for number, first in enumerate(range(0, slots, self._rows_per_microbatch))
        ]
        data = StepData(
            step=plan.step,
            microbatches=batches,
            num_targets=sum(row.num_targets for row in mine),
            num_tokens=sum(row.num_tokens for row in mine),
            num_documents=sum(len(row.lengths) for row in mine),
            epoch=self._planner.epochs_done(plan.after),
            global_targets=None if self._dealt and self._data_ranks > 1 else sum(row.num_targets for row in rows),
        )
        return data, plan.after, sum(row.num_tokens for row in rows)


def joined_state(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state of the states of all data ranks, in order of rank; what every loader can continue from.

    Args:
        states: From `StepLoader.state_dict` at the same step.
    """
    if states[0]["dealt_to"] is None:
        return states[0]
    return {**states[0], "ranks": list(states)}


def evaluation_batches(
    rows: RowSource, micro_batch_tokens: int, *, data_ranks: int = 1, rank: int = 0, pad_rows: bool = True
) -> Iterator[TokenBatch]:
    """Every document of the first epoch once; the same number of batches on every rank, the missing ones padding.

    Args:
        rows: The rows.
        micro_batch_tokens: Tokens of a batch; a multiple of the rows' pack size.
        data_ranks: Ranks that share the work.
        rank: This one.
        pad_rows: Every batch has exactly `micro_batch_tokens` tokens.

    Yields:
        Batches whose segments name their `documents`.

    Raises:
        ConfigError: `micro_batch_tokens` does not fit.
    """
    loader = StepLoader(
        rows,
        rows_per_step=max(1, micro_batch_tokens // rows.pack_size) * data_ranks,
        micro_batch_tokens=micro_batch_tokens,
        data_ranks=data_ranks,
        rank=rank,
        epochs=1,
        pad_rows=pad_rows,
    )
    for data in loader:
        yield from data.microbatches


def check_micro_batch_tokens(micro_batch_tokens: int, pack_size: int) -> None:
    """Refuse a microbatch that is no whole number of rows.

    Raises:
        ConfigError: Names both neighbours.
    """
    if micro_batch_tokens < 1 or micro_batch_tokens % pack_size:
        lower = micro_batch_tokens // pack_size * pack_size
        near = f"{lower} or {lower + pack_size}" if lower else str(pack_size)
        raise ConfigError(
            f"`train.micro_batch_tokens` must be a multiple of pack_size {pack_size}; got {micro_batch_tokens}. "
            f"Use {near}."
        )
