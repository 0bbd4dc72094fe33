"""What the packed training data look like, for the report: `data.json` of a run folder.

Everything follows from integers that packing has made anyway; no token is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from freight.data.pack.rows import IndexedRows

BINS = 32


def data_facts(rows: IndexedRows) -> dict[str, Any]:
    """Sum up the first epoch.

    Returns:
        `documents tokens rows pack_size algorithm efficiency fill packing_factor supervised_share length_quantiles
        length_histogram row_fill_histogram skipped used read mixture`. Efficiency is real tokens over all slots, fill
        the least possible number of rows over the actual one, a histogram `{edges, counts}` in tokens; `skipped` counts
        records left out by reason, `read` is `used` plus all of them; `mixture` lists `name documents share taken` of
        sources with weights.
    """
    lengths, row_tokens = rows.first_epoch()
    tokens, num_rows = int(row_tokens.sum(dtype=np.int64)), len(row_tokens)
    skipped = {reason: count for reason, count in rows.metadata.get("skipped", {}).items() if count}
    return {
        "documents": rows.num_documents,
        "tokens": tokens,
        "rows": num_rows,
        "pack_size": rows.pack_size,
        "algorithm": rows.packing["algorithm"],
        "efficiency": tokens / (num_rows * rows.pack_size),
        "fill": -(-tokens // rows.pack_size) / num_rows,
        "packing_factor": rows.num_documents / num_rows,
        "supervised_share": rows.metadata["num_target_tokens"] / rows.metadata["num_tokens"],
        "length_quantiles": _quantiles(lengths),
        "length_histogram": _histogram(lengths, _edges_from_zero(int(lengths.max()))),
        "row_fill_histogram": _histogram(row_tokens, _edges_up_to(rows.pack_size, int(row_tokens.min()))),
        "skipped": skipped,
        "used": rows.num_documents,
        "read": rows.num_documents + sum(skipped.values()),
        "mixture": [share._asdict() for share in rows.mixture],
    }


def _quantiles(lengths: np.ndarray) -> dict[str, float]:
    low, median, p90, p99, high = (float(q) for q in np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1]))
    return {"min": low, "mean": float(lengths.mean()), "median": median, "p90": p90, "p99": p99, "max": high}


def _histogram(values: np.ndarray, edges: np.ndarray) -> dict[str, list[int]]:
    counts, _ = np.histogram(values, bins=edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _edges_from_zero(high: int) -> np.ndarray:
    width = -(-high // BINS)
    return np.arange(0, high + width, width)


def _edges_up_to(high: int, low: int) -> np.ndarray:
    """Bins that end at `high`, the lowest holding `low`."""
    width = max(1, -(-(high - low) // BINS))
    return np.maximum(np.arange(high, low - width, -width)[::-1] if low < high else np.array([high - 1, high]), 0)
