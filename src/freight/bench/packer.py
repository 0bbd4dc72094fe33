"""The packer: a million lengths in seconds, the same rows as a plain scan, and how near they come to the bound.

Lengths come from three laws (many short documents with a long tail; short and long ones; all lengths alike) and from
the standard library's conversations, at four characters a token. The plain scans are first fit as anyone writes it
first: for each document it goes through the rows until one has room, and either adds up the row's documents again or
keeps the room of every row. All runs on one thread, and seconds are those of the processor: a busy machine changes
little.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from freight.bench.conversations import standard_library
from freight.bench.options import chosen_options
from freight.data.pack.first_fit import first_fit
from freight.data.pack.packing import PackedRows, pack
from freight.errors import ConfigError

SIZES = (2048, 4096, 8192)
PLACED = ("first_fit_decreasing", "first_fit_shuffle", "best_fit_decreasing")
DECREASING = ("first_fit_decreasing", "best_fit_decreasing")
LONGEST = 2048
OPTIONS = {"documents": 1_000_000, "scan": 65_536, "memory": 20_000}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Measure speed, fill and memory.

    Args:
        options: `documents` (default 1,000,000), `scan` (documents for the plain scans, default 65,536; an eighth of
            them is measured too) and `memory` (documents while memory is traced, default 20,000).

    Returns:
        `seconds_1m`: the slowest algorithm over all laws, in rows of 2,048; `speedup_64k`: the re-summing scan's time
        over the tree's, for the same rows; `speedup_64k_kept_rooms`: the same for the scan that keeps rooms;
        `fill_of_bound`: the worst of the decreasing algorithms over the laws and sizes; `bytes_per_document`: the worst
        peak; and the numbers behind them.

    Raises:
        ConfigError: An option that does not exist, or is below 8.
    """
    chosen = chosen_options(options, OPTIONS)
    for name, value in chosen.items():
        if value < 8:  # the smaller scan takes an eighth
            raise ConfigError(f"option `{name}` must be at least 8; got {value}.")
    result: dict[str, Any] = {"benchmark": "packer", **chosen}
    laws = lengths_by_law(chosen["documents"])
    seconds, fills, shuffled = {}, {}, {}
    for law, lengths in laws.items():
        for size in SIZES:
            for algorithm in PLACED:
                if size > SIZES[0] and algorithm != "first_fit_decreasing":
                    continue  # larger rows are fewer, and so quicker
                rows, seconds[law, size, algorithm] = _timed(lengths, algorithm, size)
                (fills if algorithm in DECREASING else shuffled)[law, size, algorithm] = rows.fill
    slowest = max(seconds, key=lambda key: seconds[key])
    result["seconds_1m"] = round(seconds[slowest], 3)
    result["slowest"] = f"{slowest[2]}, {slowest[0]}, rows of {slowest[1]}"
    result["fill_of_bound"] = round(min(fills.values()), 5)
    result["fill_of_bound_shuffle"] = round(min(shuffled.values()), 5)
    result["table"] = [
        {"law": law, "pack_size": size, "algorithm": algorithm, "seconds": round(seconds[key], 3)}
        | {"fill_of_bound": round((fills | shuffled)[key], 5)}
        for key in seconds
        for law, size, algorithm in (key,)
    ]
    real = lengths_of_conversations()
    rows, _ = _timed(real, "first_fit_decreasing", SIZES[0])
    result["real_documents"], result["fill_of_bound_real"] = len(real), round(rows.fill, 5)
    result |= _scans(lengths_by_law(chosen["scan"])["lognormal"], "64k")
    result |= _scans(lengths_by_law(chosen["scan"] // 8)["lognormal"], "8k")
    result["bytes_per_document"] = max(_peak(law) for law in lengths_by_law(chosen["memory"]).values())
    return result


def lengths_by_law(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """int64 `[count]` of each law, 1 to 2,048 tokens."""
    random = np.random.default_rng(seed)
    short = random.random(count) < 0.8
    return {
        "lognormal": np.clip(random.lognormal(5.2, 0.9, count), 4, LONGEST).astype(np.int64),
        "bimodal": np.where(short, random.integers(20, 200, count), random.integers(900, 1500, count)),
        "uniform": random.integers(1, LONGEST + 1, count),
    }


def lengths_of_conversations() -> np.ndarray:
    """int64: tokens of the standard library's conversations, four characters each, cut at 2,048."""
    texts = (f"{talk.question} {talk.answer}" for talk in standard_library())
    return np.array([min(LONGEST, 1 + len(text) // 4) for text in texts])


def rescanning_first_fit(lengths: list[int], pack_size: int) -> list[int]:
    """First fit that adds up each row's documents anew for every document."""
    rows: list[list[int]] = []
    placed = []
    for length in lengths:
        for number, row in enumerate(rows):
            if sum(row) + length <= pack_size:
                row.append(length)
                placed.append(number)
                break
        else:
            placed.append(len(rows))
            rows.append([length])
    return placed


def scanning_first_fit(lengths: list[int], pack_size: int) -> list[int]:
    """First fit that keeps the room of each row, and scans the rooms."""
    rooms: list[int] = []
    placed = []
    for length in lengths:
        for number, room in enumerate(rooms):
            if room >= length:
                rooms[number] -= length
                placed.append(number)
                break
        else:
            placed.append(len(rooms))
            rooms.append(pack_size - length)
    return placed


def _scans(lengths: np.ndarray, name: str) -> dict[str, Any]:
    """Both scans against the tree, which must place every document in the same row."""
    tree = min(_seconds(lambda: first_fit(lengths, LONGEST)) for _ in range(3))
    expected = first_fit(lengths, LONGEST).tolist()
    found: dict[str, Any] = {f"tree_{name}_seconds": round(tree, 4)}
    scans: dict[str, Callable[[list[int], int], list[int]]] = {
        "": rescanning_first_fit,
        "_kept_rooms": scanning_first_fit,
    }
    for suffix, scan in scans.items():
        started = time.process_time()
        placed = scan(lengths.tolist(), LONGEST)
        seconds = time.process_time() - started
        assert placed == expected, "the scan and the tree place documents in different rows"
        found |= {
            f"scan_{name}{suffix}_seconds": round(seconds, 3),
            f"speedup_{name}{suffix}": round(seconds / tree, 1),
        }
    return found


def _timed(lengths: np.ndarray, algorithm: str, pack_size: int) -> tuple[PackedRows, float]:
    started = time.process_time()
    rows = pack(lengths, algorithm, pack_size, seed=0)
    return rows, time.process_time() - started


def _seconds(function: Callable[[], object]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def _peak(lengths: np.ndarray) -> int:
    """Most bytes per document that packing holds at one time, over the algorithms."""
    peaks = []
    for algorithm in PLACED:
        tracemalloc.start()
        pack(lengths, algorithm, SIZES[0], seed=0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return max(peaks) // len(lengths)
