"""From rows to the flat stream that the model sees.

Padding exists only here: behind a span when spans take multiples, and as a segment of its own at the end of a row when
shapes are static. It is marked by length, never by an id, so a pad id that equals the end-of-text id is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from freight.data.pack.packing import round_up
from freight.data.pack.rows import Row
from freight.ops.batch import IGNORE_INDEX, TokenBatch


def build_microbatch(
    rows: Sequence[Row],
    *,
    pack_size: int,
    num_rows: int,
    document_multiple: int = 1,
    pad_id: int = 0,
    pad_rows: bool = True,
    seed: int = 0,
    step: int = 0,
    microbatch: int = 0,
) -> TokenBatch:
    """The spans of some rows one after another.

    Args:
        rows: Rows that have documents; may be fewer than `num_rows`, or none.
        pack_size: Tokens of a row.
        num_rows: Rows of a microbatch; the missing ones are padding without labels.
        document_multiple: Every span is padded to a multiple of it.
        pad_id: Fills padding; has no influence on loss or gradients.
        pad_rows: False leaves out what no document needs, so that streams differ in length.
        seed: Of everything random inside the model.
        step: Optimizer step.
        microbatch: Number within the global batch.

    Returns:
        A batch of `num_rows * pack_size` tokens, or fewer without `pad_rows`.
    """
    sizes: list[np.ndarray] = []  # tokens of each segment, padding included
    lengths: list[np.ndarray] = []  # real tokens of each segment
    documents: list[np.ndarray] = []
    for row in rows:
        padded = round_up(row.lengths, document_multiple)
        rest = pack_size - int(padded.sum()) if pad_rows else 0
        tail = [rest] if rest else []
        sizes.append(np.append(padded, tail))
        lengths.append(np.append(row.lengths, [0] * len(tail)))
        documents.append(np.append(row.documents, [-1] * len(tail)))
    missing = (num_rows - len(rows)) * pack_size
    if not pad_rows:
        missing = 0 if rows else document_multiple  # a stream cannot be empty
    if missing:
        sizes.append(np.array([missing]))
        lengths.append(np.array([0]))
        documents.append(np.array([-1]))

    segment_sizes = np.concatenate(sizes).astype(np.int64)
    segment_lengths = np.concatenate(lengths).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(segment_sizes)])
    positions = _positions(segment_lengths)
    places = np.repeat(starts[:-1], segment_lengths) + positions

    def spread(values: np.ndarray | int, empty: int) -> torch.Tensor:
        stream = np.full(int(starts[-1]), empty, dtype=np.int64)
        stream[places] = values
        return torch.from_numpy(stream)

    return TokenBatch(
        input_ids=spread(np.concatenate([row.ids for row in rows]) if rows else 0, pad_id),
        labels=spread(np.concatenate([_labels(row) for row in rows]) if rows else 0, IGNORE_INDEX),
        position_ids=spread(positions, 0),
        cu_seqlens=tuple(starts.tolist()),
        lengths=tuple(segment_lengths.tolist()),
        documents=tuple(np.concatenate(documents).astype(np.int64).tolist()),
        seed=seed,
        step=step,
        microbatch=microbatch,
    )


def _positions(lengths: np.ndarray) -> np.ndarray:
    """int64 `[sum of lengths]`: 0, 1, 2, ... anew in every segment."""
    begins = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(begins, lengths)


def _labels(row: Row) -> np.ndarray:
    """int64 `[tokens]`: the next token of the same span where it is a target, else `IGNORE_INDEX`."""
    labels = np.full(row.num_tokens, IGNORE_INDEX, dtype=np.int64)
    labels[:-1] = np.where(row.loss_mask[1:], row.ids[1:], IGNORE_INDEX)
    last = np.cumsum(row.lengths) - 1
    labels[last] = np.where(row.tail_labels >= 0, row.tail_labels, IGNORE_INDEX)
    return labels
