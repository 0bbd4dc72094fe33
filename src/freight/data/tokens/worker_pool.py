"""One function, many tasks, several processes; results come back in the order of the tasks.

Each worker holds one task at a time and its pipe is written only while it waits, so no two ends ever block on each
other. How far reading runs ahead is bounded, and with it memory. Processes are spawned: a fork would copy threads'
locks. A spawn costs about 3 s, so this is for large input.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, TypeVar

from freight.errors import DataError, FreightError

Kept = TypeVar("Kept")
Task = TypeVar("Task")
Result = TypeVar("Result")

AHEAD = 3  # tasks per worker that are read before the oldest result is taken
CLOSE_SECONDS = 5.0


class WorkerDeath(DataError):
    """A worker ended before its time; what was finished until then is good."""


class Slot(Generic[Kept]):
    """The place of a task in the order, and its outcome once it is there."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.outcome: tuple[bool, Any] | None = None


class WorkerPool(Generic[Task, Result]):
    """Processes that run a function. Use as a context manager.

    Args:
        function: Called with a task; it, tasks and results can be pickled.
        processes: How many.
        work: What they do, for messages.
    """

    def __init__(self, function: Callable[[Task], Result], processes: int, work: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._work = work
        self._processes: dict[Any, BaseProcess] = {}
        self._running: dict[Any, Slot[Any]] = {}
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, function), name=f"freight {work}", daemon=True)
            process.start()
            theirs.close()
            self._processes[ours] = process
        self._idle = list(self._processes)

    def __enter__(self) -> WorkerPool[Task, Result]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection, process in self._processes.items():
            connection.close()
            if kind is not None or connection in self._running:
                process.terminate()
        for process in self._processes.values():
            process.join(CLOSE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()

    def map(self, tasks: Iterable[tuple[Kept, Task]]) -> Generator[tuple[Kept, Result]]:
        """Run every task.

        Args:
            tasks: What stays here, and what is sent. Read only a few tasks ahead of the results.

        Yields:
            What stayed here, and the result.

        Raises:
            WorkerDeath: A worker died.
            Exception: Whatever the function raised, or what reading the tasks raised, once the results of all tasks
                before it have been yielded.
        """
        source = iter(tasks)
        order: deque[Slot[Kept]] = deque()
        ended: BaseException | None = None
        while True:
            while self._idle and ended is None and len(order) < AHEAD * len(self._processes):
                try:
                    kept, task = next(source)
                except Exception as error:
                    ended = error
                else:
                    order.append(Slot(kept))
                    self._send(task, order[-1])
            if order and order[0].outcome is not None:
                yield self._take(order.popleft())
            elif order:
                self._receive()
            elif not isinstance(ended, StopIteration):
                assert ended is not None
                raise ended
            else:
                return

    def _send(self, task: Any, slot: Slot[Any]) -> None:
        connection = self._idle.pop()
        self._running[connection] = slot
        try:
            connection.send(task)
        except BrokenPipeError:
            raise self._death(connection) from None

    def _receive(self) -> None:
        """Wait for results; whoever sent one is idle again."""
        ready: list[Any] = wait(list(self._running))
        for connection in ready:
            try:
                outcome = connection.recv()
            except (EOFError, ConnectionResetError):
                raise self._death(connection) from None
            self._running.pop(connection).outcome = outcome
            self._idle.append(connection)

    def _take(self, slot: Slot[Kept]) -> tuple[Kept, Any]:
        assert slot.outcome is not None
        good, result = slot.outcome
        if not good:
            raise result
        return slot.kept, result

    def _death(self, connection: Any) -> WorkerDeath:
        process = self._processes[connection]
        process.join(CLOSE_SECONDS)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
            return WorkerDeath(f"a process of {self._work} {how}; memory may have run out: give the machine more")
        return WorkerDeath(
            f"a process of {self._work} ended with code {code}; a script that calls Freight must do so below "
            'if __name__ == "__main__"'
        )


def serve(connection: Connection, function: Callable[[Any], Any]) -> None:
    """A worker's life: tasks in, outcomes out, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's own threads would be too many
    try:
        while True:
            task = connection.recv()
            try:
                outcome = True, function(task)
            except FreightError as error:
                outcome = False, error
            except Exception:  # a fault of ours: its text travels, since not every exception can
                outcome = False, RuntimeError(traceback.format_exc())
            connection.send(outcome)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def usable_processes(limit: int) -> int:
    """How many processes this one may run at once: its cores, and none below a daemon, which must have no children."""
    if multiprocessing.current_process().daemon:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, limit)
