"""Peak memory of a process with all its children, sampled from outside.

Resident bytes of every process are added up, so pages that several share count several times: the sum is never below
what the machine really holds. Sampling may miss a peak shorter than the interval. Linux only: it reads `/proc`.
"""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from types import TracebackType

INTERVAL_SECONDS = 0.05


class PeakMemory:
    """Samples while it is open. Use as a context manager.

    Args:
        pid: Root of the tree.

    Attributes:
        peak_bytes: Largest sum seen.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(INTERVAL_SECONDS):
            self.peak_bytes = max(self.peak_bytes, tree_bytes(self._pid))


def tree_bytes(pid: int) -> int:
    """Resident bytes of a process and all below it; processes that end meanwhile count 0."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            children.setdefault(parent_of(path), []).append(int(path.name))
    total, left = 0, [pid]
    while left:
        current = left.pop()
        total += resident_bytes(Path("/proc") / str(current))
        left += children.get(current, ())
    return total


def parent_of(process: Path) -> int:
    """Id of a process's parent; 0 if it is gone."""
    try:
        # The command's name stands in parentheses and may hold spaces: fields are counted behind it.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def resident_bytes(process: Path) -> int:
    """Bytes of a process in memory; 0 if it is gone."""
    try:
        return int((process / "statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0
