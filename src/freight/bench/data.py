"""Tokenising a JSON Lines file of chats, against `datasets.map`: tokens per second and peak memory of all processes.

Both sides read the same file, with the same tokenizer and template, into an empty cache; imports and the tokenizer's
loading are not timed, starting processes is. `datasets` runs with as many processes as there are cores or with none,
whichever is faster on a small file first. The file is the demo's conversations, repeated and varied.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from freight.bench.conversations import standard_library
from freight.bench.demo import find_model
from freight.bench.loader_speed import loader_throughput
from freight.bench.options import chosen_options
from freight.bench.process_tree import PeakMemory
from freight.errors import DataError

OPTIONS: dict[str, Any] = {
    "megabytes": 64,
    "repeats": 3,
    "max_seconds": 150.0,
    "pack": True,
    "compare": True,
    "loader": True,
    "tokenizer": None,
}
MEBIBYTE = 1 << 20
TRIAL_MEBIBYTES = 8
MOST_PROCESSES = 8


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Measure both sides in turns.

    Args:
        options: `megabytes` of the file (default 64), `repeats` of each side (3), `max_seconds` after which no
            further repeat is begun (150), `pack` (true: memory counts packing too), `compare` (false: only Freight),
            `loader` (true: also what happens behind: microbatches from documents, see `loader_throughput`),
            `tokenizer` (default: the demo's).

    Returns:
        `tokens_per_second`, `tokens_per_second_per_core` (one process, one thread, on a small file),
        `peak_resident_bytes` (sampled sum over the process and its children, tokenising and packing),
        `ratio_over_datasets_map` (their seconds over ours) and the numbers behind them.

    Raises:
        ConfigError: An option that does not exist.
        CheckpointError: The demo's model, which carries the tokenizer, is not installed.
        DataError: A side failed.
    """
    chosen = chosen_options(options, OPTIONS)
    tokenizer = chosen["tokenizer"] or str(find_model())
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="freight-bench-") as folder:
        place = Path(folder)
        trial, file = place / "trial.jsonl", place / "chats.jsonl"
        write_chats(trial, TRIAL_MEBIBYTES * MEBIBYTE)
        write_chats(file, chosen["megabytes"] * MEBIBYTE)
        alone = run_side("freight", trial, tokenizer, place, processes=1, pack=False, threads=1)
        plain = fastest_plain(trial, tokenizer, place, cores) if chosen["compare"] else None
        runs: dict[str, list[dict[str, Any]]] = {"freight": [], "datasets": []}
        began = time.monotonic()
        for number in range(chosen["repeats"]):
            if number and time.monotonic() - began > chosen["max_seconds"]:
                break
            runs["freight"].append(run_side("freight", file, tokenizer, place, processes=0, pack=chosen["pack"]))
            if plain is not None:
                runs["datasets"].append(run_side("datasets", file, tokenizer, place, processes=plain))
        result = {"benchmark": "data", **chosen, "cores": cores, "processes": min(cores, MOST_PROCESSES)}
        result |= {"file_bytes": file.stat().st_size, "repeats_done": len(runs["freight"])}
    return result | summary(runs, alone, plain) | (loader_throughput() if chosen["loader"] else {})


def summary(runs: Mapping[str, list[dict[str, Any]]], alone: Mapping[str, Any], plain: int | None) -> dict[str, Any]:
    """Medians, and the ratio of both sides.

    Args:
        runs: Of each side.
        alone: One process of ours on the small file.
        plain: Processes of the other side; None = it did not run.
    """
    ours, theirs = runs["freight"], runs["datasets"]
    seconds = statistics.median(each["seconds"] for each in ours)
    result: dict[str, Any] = {
        "documents": ours[0]["documents"],
        "tokens": ours[0]["tokens"],
        "seconds": round(seconds, 2),
        "tokens_per_second": round(ours[0]["tokens"] / seconds),
        "tokens_per_second_per_core": round(alone["tokens"] / alone["seconds"]),
        "peak_resident_bytes": max(each["peak_resident_bytes"] for each in ours),
        "measured_as": "largest sum of resident bytes over the process and its children, sampled every 50 ms",
    }
    if "pack_seconds" in ours[0]:
        result["pack_seconds"] = round(statistics.median(each["pack_seconds"] for each in ours), 2)
    if plain is None:
        return result
    plain_seconds = statistics.median(each["seconds"] for each in theirs)
    return result | {
        "ratio_over_datasets_map": round(plain_seconds / seconds, 3),
        "datasets_seconds": round(plain_seconds, 2),
        "datasets_num_proc": plain,
        "datasets_peak_resident_bytes": max(each["peak_resident_bytes"] for each in theirs),
        "same_tokens": {each["tokens"] for each in theirs} == {each["tokens"] for each in ours},
    }


def fastest_plain(trial: Path, tokenizer: str, folder: Path, cores: int) -> int:
    """Number of processes, of none and one per core, with which `datasets` is faster on the small file."""
    counts = (0, min(cores, MOST_PROCESSES))
    return min(counts, key=lambda count: run_side("datasets", trial, tokenizer, folder, processes=count)["seconds"])


def run_side(
    side: str, file: Path, tokenizer: str, folder: Path, *, threads: int = 0, **options: Any
) -> dict[str, Any]:
    """One side in a process of its own; its result and its peak memory.

    Args:
        side: A key of the table in `data_sides`.
        file: To tokenise.
        tokenizer: Path of the tokenizer.
        folder: Gets a folder for everything it writes, removed at the end.
        threads: 1 = the tokenizer's library runs in one thread; 0 = as it likes.
        options: Of the side.

    Raises:
        DataError: It failed; with the last line it said.
    """
    environment = {"HF_HUB_OFFLINE": "1"} | ({"TOKENIZERS_PARALLELISM": "false"} if threads == 1 else {})
    with tempfile.TemporaryDirectory(dir=folder) as own:
        arguments = json.dumps({"file": str(file), "tokenizer_path": tokenizer, "folder": own, **options})
        # `env` adds to the environment; to hand over a whole one, it would have to be read first.
        process = subprocess.Popen(
            ["/usr/bin/env", *(f"{key}={value}" for key, value in environment.items())]
            + [sys.executable, "-m", "freight.bench.data_sides", side, arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with PeakMemory(process.pid) as memory:
            out, said = process.communicate()
    if process.returncode:
        lines = said.strip().splitlines() or [f"exit code {process.returncode}"]
        raise DataError(f"the side {side} of the benchmark failed: {lines[-1]}")
    return {**json.loads(out.strip().splitlines()[-1]), "peak_resident_bytes": memory.peak_bytes}


def write_chats(path: Path, size: int) -> None:
    """Write the demo's conversations again and again, each time a little different, until the file is large enough."""
    written = 0
    with path.open("wb") as file:
        for record in rounds():
            line = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            written += file.write(line)
            if written >= size:
                return


def rounds() -> Iterator[dict[str, Any]]:
    """The demo's conversations again and again, each time in another wording; read only as far as they are wanted."""
    records: list[dict[str, Any]] = []
    for conversation in standard_library():
        records.append(conversation.record())
        yield varied(records[-1], 0)
    for number in count(1):
        yield from (varied(record, number) for record in records)


def varied(record: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A record in another wording: the question ends in a number of its own."""
    question, answer = record["messages"]
    if not number:
        return {"messages": [question, answer]}
    return {"messages": [{**question, "content": f"{question['content']}\n\nThis is variant {number}."}, answer]}
