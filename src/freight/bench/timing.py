"""Fair timing on a shared machine: two sides alternate in one process, and the medians are compared.

A machine that slows down for a while slows both sides. Only the ratio is worth quoting.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def alternating_medians(
    sides: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 7,
    max_seconds: float = 60.0,
    wait: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Median seconds of each side, measured turn by turn.

    Args:
        sides: What to time, by name.
        repeats: Measurements of each side.
        max_seconds: After 3 measurements of each side, no more are begun past this time.
        wait: Called before a clock is read, to wait for a device; e.g. `torch.cuda.synchronize`.
    """
    for function in sides.values():
        function()  # allocations and kernel choices of a first run are not measured
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    begin = time.perf_counter()
    for done in range(repeats):
        if done >= 3 and time.perf_counter() - begin > max_seconds:
            break
        for name, function in sides.items():
            seconds[name].append(_time(function, wait))
    return {name: statistics.median(values) for name, values in seconds.items()}


def _time(function: Callable[[], object], wait: Callable[[], object] | None) -> float:
    if wait is not None:
        wait()
    start = time.perf_counter()
    function()
    if wait is not None:
        wait()
    return time.perf_counter() - start
