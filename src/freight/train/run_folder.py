"""Small files of a run folder beside metrics and checkpoints: how the run stands, its warnings, facts on its data.

    status.json     state, message, step; rewritten, so a report can say what happened even after a failure
    warnings.jsonl  one warning per line: step, time, message
    data.json       what the packed training data looks like (`data_facts`)
    plan.txt        the resolved plan in words, a line each

Every file is replaced at once or appended by a single write: a crash leaves the old one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

State = Literal["running", "finished", "interrupted", "failed"]

STATUS_FILE = "status.json"
WARNINGS_FILE = "warnings.jsonl"
DATA_FILE = "data.json"
PLAN_FILE = "plan.txt"
HISTOGRAM_BINS = 32


@dataclass(frozen=True)
class RunStatus:
    """How a run stands.

    Args:
        state: `running`, `finished`, `interrupted` (saved, can be resumed) or `failed`.
        message: One line for the reader: how to resume, or what went wrong.
        step: Optimizer steps done.
        total_steps: Steps the run will have; None if not known.
    """

    state: State
    message: str = ""
    step: int = 0
    total_steps: int | None = None


def write_status(run_dir: Path | str, status: RunStatus) -> None:
    """Replace `status.json`."""
    write_json(Path(run_dir) / STATUS_FILE, {**asdict(status), "time": time.time()})


def add_warning(run_dir: Path | str, message: str, *, step: int = 0) -> None:
    """Append one warning."""
    line = json.dumps({"step": step, "time": time.time(), "message": message}, ensure_ascii=False)
    with (Path(run_dir) / WARNINGS_FILE).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def write_plan(run_dir: Path | str, lines: Sequence[str]) -> None:
    """Replace `plan.txt`."""
    (Path(run_dir) / PLAN_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file beside its place, then put it there."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def data_facts(
    document_lengths: ArrayLike,
    row_tokens: ArrayLike,
    *,
    pack_size: int,
    target_tokens: int,
    used: int | None = None,
    skipped: dict[str, int] | None = None,
    algorithm: str | None = None,
) -> dict[str, Any]:
    """What the report shows of the training data; goes to `data.json`.

    Args:
        document_lengths: Tokens of every span (a document, or a piece of one), one epoch.
        row_tokens: Real tokens of every row, the same epoch.
        pack_size: Tokens of a row.
        target_tokens: Tokens with a loss, the same epoch.
        used: Records that became documents; by default as many as spans.
        skipped: Records left out, by reason.
        algorithm: Packing algorithm.

    Returns:
        `documents tokens rows pack_size efficiency fill packing_factor supervised_share length_histogram
        row_fill_histogram length_quantiles skipped read used algorithm`. Efficiency is real tokens over all slots, fill
        the least possible number of rows over the actual one; histograms are `{edges, counts}` in tokens.
    """
    lengths = np.asarray(document_lengths, dtype=np.int64)
    rows = np.asarray(row_tokens, dtype=np.int64)
    tokens = int(lengths.sum())
    reasons = {reason: count for reason, count in (skipped or {}).items() if count}
    used = len(lengths) if used is None else used
    return {
        "documents": len(lengths),
        "tokens": tokens,
        "rows": len(rows),
        "pack_size": pack_size,
        "algorithm": algorithm,
        "efficiency": tokens / (len(rows) * pack_size) if len(rows) else 0.0,
        "fill": -(-tokens // pack_size) / len(rows) if len(rows) else 0.0,
        "packing_factor": len(lengths) / len(rows) if len(rows) else 0.0,
        "supervised_share": target_tokens / tokens if tokens else 0.0,
        "length_quantiles": _quantiles(lengths),
        "length_histogram": _histogram(lengths, int(lengths.max(initial=1))),
        "row_fill_histogram": _histogram(rows, pack_size),
        "skipped": reasons,
        "used": used,
        "read": used + sum(reasons.values()),
    }


def _quantiles(lengths: np.ndarray) -> dict[str, float]:
    if not len(lengths):
        return {}
    low, median, p90, p99, high = (float(q) for q in np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1]))
    return {"min": low, "mean": float(lengths.mean()), "median": median, "p90": p90, "p99": p99, "max": high}


def _histogram(values: np.ndarray, top: int) -> dict[str, list[float] | list[int]]:
    """Equal bins of whole tokens from 0 to at least `top`."""
    width = -(-max(top, 1) // HISTOGRAM_BINS)
    edges = np.arange(0, HISTOGRAM_BINS + 1) * width
    edges = edges[: int(np.searchsorted(edges, top)) + 1]
    counts, _ = np.histogram(values, bins=edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}
