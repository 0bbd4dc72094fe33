"""Which rows make which step: integers alone, so that any rank finds the same answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from freight.data.pack.rows import RowSource


@dataclass(frozen=True)
class Cursor:
    """Where the data stand: all of a loader's state.

    Args:
        step: The next step.
        epoch: Epoch of the next row.
        window: Window of the next row.
        row: Number of the next row in its window.
        epoch_rows: Rows consumed of this epoch.
        consumed_samples: Rows consumed in all.
        consumed_tokens: Real tokens consumed in all, on all ranks.
    """

    step: int = 0
    epoch: int = 0
    window: int = 0
    row: int = 0
    epoch_rows: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0

    def next_epoch(self) -> Cursor:
        """The first row of the epoch after this one."""
        return replace(self, epoch=self.epoch + 1, window=0, row=0, epoch_rows=0)


@dataclass(frozen=True)
class StepPlan:
    """The rows of a step, each `(epoch, window, number)`, and where the data stand after it, tokens not yet counted."""

    step: int
    rows: list[tuple[int, int, int]]
    after: Cursor


class StepPlanner:
    """Cuts the stream of rows into steps; see `StepLoader` for what the arguments mean."""

    def __init__(
        self, rows: RowSource, rows_per_step: int, *, drop_last: bool, epochs: float | None, steps: int | None
    ) -> None:
        assert (epochs is None) != (steps is None), "either epochs or steps"
        self._rows = rows
        self._rows_per_step = rows_per_step
        self._drop_last = drop_last
        self._epochs = epochs
        self._steps = steps

    @property
    def total_steps(self) -> int:
        """Steps from the very first to the last. With `epochs`, packs every epoch to count."""
        if self._steps is not None:
            return self._steps
        return sum(self.steps_in(epoch) for epoch in range(math.ceil(self._epochs or 0)))

    def rows_taken(self, epoch: int) -> int:
        """Rows that are taken from an epoch."""
        count = sum(takewhile(bool, (self._rows.rows_in(epoch, window) for window in itertools.count())))
        if self._epochs is not None and epoch + 1 > self._epochs:
            return math.ceil(count * max(0.0, self._epochs - epoch))
        return count

    def steps_in(self, epoch: int) -> int:
        """Steps of an epoch that starts with a step of its own."""
        whole, tail = divmod(self.rows_taken(epoch), self._rows_per_step)
        return whole + (tail > 0 and not self._drop_last)

    def _finished(self, cursor: Cursor) -> bool:
        """No row of the cursor's epoch is left."""
        if not self._rows.rows_in(cursor.epoch, cursor.window):
            return True
        partial = self._epochs is not None and cursor.epoch + 1 > self._epochs
        return partial and cursor.epoch_rows >= self.rows_taken(cursor.epoch)

    def plans(self, cursor: Cursor) -> Iterator[StepPlan]:
        """The rows of each step from a cursor on; integers only."""
        while self._steps is None or cursor.step < self._steps:
            taken: list[tuple[int, int, int]] = []
            while len(taken) < self._rows_per_step:
                if self._finished(cursor):
                    if taken and self._steps is None and not self._drop_last:
                        break
                    if self._drop_last:
                        taken = []
                    cursor = cursor.next_epoch()
                    if self._epochs is not None and cursor.epoch >= self._epochs:
                        return
                elif cursor.row >= self._rows.rows_in(cursor.epoch, cursor.window):
                    cursor = replace(cursor, window=cursor.window + 1, row=0)
                else:
                    taken.append((cursor.epoch, cursor.window, cursor.row))
                    cursor = replace(cursor, row=cursor.row + 1, epoch_rows=cursor.epoch_rows + 1)
            step = cursor.step
            cursor = replace(cursor, step=step + 1, consumed_samples=cursor.consumed_samples + len(taken))
            yield StepPlan(step, taken, cursor)

    def epochs_done(self, cursor: Cursor) -> float:
        """Epochs behind a cursor."""
        return self._rows.epochs_done(cursor.epoch, cursor.window, cursor.row)
