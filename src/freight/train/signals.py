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

    Handlers belong to the main thread; entered on another thread this only ever reports None.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in EXIT_CODES}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """Exit code that the signal asks for; 0 without one."""
        return 0 if self.requested is None else EXIT_CODES[self.requested]

    def agree(self, world: World) -> None:
        """Take a signal that any rank has got for all of them: they stop after the same step.

        **Communication**: one all-reduce of a number.
        """
        if number := world.largest(0 if self.requested is None else int(self.requested)):
            self.requested = signal.Signals(number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested is not None:
            os._exit(128 + number)
        self.requested = signal.Signals(number)
