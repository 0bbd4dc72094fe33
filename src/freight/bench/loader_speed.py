"""How fast the loader makes microbatches, against a plain copy of the same tensors, and whether a step hides it.

A loader that is fast enough costs a training step nothing: with threads it works while the step computes. So beside its
rate, what counts is the time a loop of 10 ms steps spends waiting for data.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from freight.bench.timing import alternating_medians
from freight.data.documents import Document, InMemoryDocuments
from freight.data.load.loader import StepData, StepLoader
from freight.data.pack.document_rows import DocumentRows
from freight.ops.batch import TokenBatch

WARM_UP_STEPS = 5


def loader_throughput(
    *,
    documents: int = 20_000,
    mean_tokens: int = 300,
    pack_size: int = 2048,
    rows_per_step: int = 8,
    steps: int = 50,
    step_seconds: float = 0.010,
    num_workers: int = 2,
    prefetch_batches: int = 2,
    repeats: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure the loader on documents in memory, packed by `first_fit_shuffle`.

    Args:
        documents: How many there are; lengths are exponential, at most `pack_size`.
        mean_tokens: Of a document, before the cut.
        pack_size: Tokens of a row, and of a microbatch.
        rows_per_step: Microbatches of a step.
        steps: Steps per measurement.
        step_seconds: What a training step takes on the device; the loop sleeps so long.
        num_workers: Threads of the loader in the loop of steps.
        prefetch_batches: Steps they work ahead.
        repeats: Measurements of rate and copy, alternating.
        seed: Of lengths and ids.

    Returns:
        `loader_tokens_per_second` and `copy_tokens_per_second` on one thread (slots, padding included),
        `loader_vs_copy`, `build_ms_per_step`, and for the loop of steps `waiting_ms_per_step` (median and worst).
    """
    rows = synthetic_rows(documents, mean_tokens, pack_size, seed)

    def loader(workers: int) -> Iterator[StepData]:
        return islice(
            StepLoader(
                rows,
                rows_per_step=rows_per_step,
                micro_batch_tokens=pack_size,
                num_workers=workers,
                prefetch_batches=prefetch_batches,
                steps=steps + WARM_UP_STEPS,
            ),
            steps + WARM_UP_STEPS,
        )

    made = [batch for step in loader(0) for batch in step.microbatches][: steps * rows_per_step]

    def build() -> None:
        for _ in islice(loader(0), steps):
            pass

    def copy() -> None:
        for batch in made:
            copied(batch)

    seconds = alternating_medians({"loader": build, "copy": copy}, repeats=repeats)
    slots = steps * rows_per_step * pack_size
    waits = waiting(loader(num_workers), step_seconds)
    return {
        "loader_tokens_per_second": slots / seconds["loader"],
        "copy_tokens_per_second": slots / seconds["copy"],
        "loader_vs_copy": seconds["copy"] / seconds["loader"],
        "build_ms_per_step": 1e3 * seconds["loader"] / steps,
        "step_ms": 1e3 * step_seconds,
        "waiting_ms_per_step": 1e3 * statistics.median(waits),
        "worst_waiting_ms": 1e3 * max(waits),
        "tokens_per_step": rows_per_step * pack_size,
    }


def synthetic_rows(documents: int, mean_tokens: int, pack_size: int, seed: int) -> DocumentRows:
    """Packed rows of random documents, half of each supervised."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.exponential(mean_tokens, documents).astype(np.int64), 2, pack_size)
    made = [
        Document(random.integers(0, 32_000, length, dtype=np.int32), np.arange(length) >= length // 2)
        for length in lengths.tolist()
    ]
    return DocumentRows(InMemoryDocuments(made), "first_fit_shuffle", pack_size, seed)


def copied(batch: TokenBatch) -> tuple[Any, Any, Any]:
    """The least that making a microbatch can cost: its three tensors, copied."""
    return batch.input_ids.clone(), batch.labels.clone(), batch.position_ids.clone()


def waiting(steps: Iterator[StepData], step_seconds: float) -> list[float]:
    """Seconds that a loop of steps waits for each, after a few; the device is played by a sleep."""
    waits = []
    began = time.perf_counter()
    for _ in steps:
        waits.append(time.perf_counter() - began)
        time.sleep(step_seconds)
        began = time.perf_counter()
    return waits[WARM_UP_STEPS:]
