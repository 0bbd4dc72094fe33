"""SIGINT, SIGTERM and SIGUSR1 as a request to stop after the step; a second one exits at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from freight.train.launch import World

# Slurm's warning before the time limit asks for a clean end, which is not a failure.
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 0}


class StopSignals:
    """While entered, `requested` tells which signal asked the run to stop, if any.

    Of several ranks, that is what they last agreed on: a signal that one of them gets meanwhile waits until they agree
    again, or it alone would stop and the others wait for it.

    Handlers belong to the main thread; entered on another thread this only ever reports None.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._agreed: signal.Signals | None = None
        self._alone = True
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in EXIT_CODES}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> signal.Signals | None:
        """The signal that asked the run to stop; None without one."""
        return self._received if self._alone else self._agreed

    @property
    def exit_code(self) -> int:
        """Exit code that the signal asks for; 0 without one."""
        return 0 if self.requested is None else EXIT_CODES[self.requested]

    def agree(self, world: World) -> None:
        """Take a signal that any rank has got for all of them: they stop after the same step.

        **Communication**: one all-reduce of a number.
        """
        self._alone = world.size == 1
        if number := world.largest(0 if self._received is None else int(self._received)):
            self._agreed = signal.Signals(number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._received is not None:
            os._exit(128 + number)
        self._received = signal.Signals(number)
