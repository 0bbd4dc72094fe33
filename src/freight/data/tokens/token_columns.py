"""Many documents as a few arrays: what workers send, what is written to disk, and what is mapped from it.

Targets are kept as runs, ids as uint16 where the vocabulary allows: about 2.1 bytes per token. Arrays over all
documents of a batch cost a tenth of what an object per document does, in time and in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freight.data.documents import Document, document_digest


@dataclass(frozen=True, eq=False)
class DocumentColumns:
    """Documents, end to end.

    Args:
        lengths: int32 `[documents]`, tokens of each.
        ids: uint16 or uint32 `[tokens]`.
        run_counts: int32 `[documents]`, borders of runs of targets of each.
        runs: int32, start, stop, start, stop, ... within each document.
        tails: int32 `[documents]`, see `Document.tail_label`.
        targets: Labels that are not `IGNORE_INDEX`, of all documents together.
        digests: 16 bytes of each, see `document_digest`.
    """

    lengths: NDArray[np.int32]
    ids: NDArray[Any]
    run_counts: NDArray[np.int32]
    runs: NDArray[np.int32]
    tails: NDArray[np.int32]
    targets: int
    digests: bytes

    def documents(self) -> Iterator[Document]:
        """The documents, one by one."""
        token, run = 0, 0
        for length, count, tail in zip(
            self.lengths.tolist(), self.run_counts.tolist(), self.tails.tolist(), strict=True
        ):
            ids, runs = self.ids[token : token + length], self.runs[run : run + count]
            yield document_of(ids, runs, tail)
            token, run = token + length, run + count


def columns_of(documents: Sequence[Document], id_type: Any) -> DocumentColumns:
    """Documents as columns.

    Args:
        documents: In order.
        id_type: `np.uint16` or `np.uint32`.
    """
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    run_counts, runs = target_runs([document.loss_mask for document in documents], lengths)
    return DocumentColumns(
        lengths,
        np.concatenate([np.zeros(0, dtype=np.int32), *(document.ids for document in documents)]).astype(id_type),
        run_counts,
        runs,
        np.array([document.tail_label for document in documents], dtype=np.int32),
        sum(document.num_targets for document in documents),
        b"".join(map(document_digest, documents)),
    )


def id_type_of(vocab_size: int) -> Any:
    """The narrowest type that holds every id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def target_runs(
    masks: Sequence[NDArray[np.bool_]], lengths: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Borders of the runs of targets of every document, and how many each has.

    Args:
        masks: bool `[length]` of each document.
        lengths: Their lengths.
    """
    # A False in front of each document and one behind the last keep the runs of neighbours apart.
    starts = np.cumsum(lengths + 1) - (lengths + 1)
    padded = np.zeros(int(lengths.sum()) + len(lengths) + 1, dtype=np.bool_)
    for start, mask in zip(starts.tolist(), masks, strict=True):
        padded[start + 1 : start + 1 + len(mask)] = mask
    borders = np.flatnonzero(padded[1:] != padded[:-1])
    # A run that ends with its document has its border on the next one's start: the document is that of its run.
    owners = np.repeat(np.searchsorted(starts, borders[::2], side="right") - 1, 2)
    counts = np.bincount(owners, minlength=len(lengths)) if len(lengths) else np.zeros(0)
    return counts.astype(np.int32), (borders - starts[owners]).astype(np.int32)


def document_of(ids: NDArray[Any], runs: NDArray[np.int32], tail: int) -> Document:
    """One document from its slice of the columns."""
    mask = np.zeros(len(ids), dtype=np.bool_)
    for start, stop in runs.reshape(-1, 2).tolist():
        mask[start:stop] = True
    return Document(ids.astype(np.int32), mask, tail)
