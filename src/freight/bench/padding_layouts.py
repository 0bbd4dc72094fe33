"""The same documents laid out in every way a training loop may: padded in three ways, unpacked as Freight does, packed.

In the padded layouts a pad is a token like any other, computed by every linear and by attention, and only the loss
passes over it; this is what a loop without packing does. `unpacked` is Freight's own `data.packing: null`, where
padding belongs to no document and attention never sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from freight.config.architecture import Architecture
from freight.data.documents import NO_TAIL, Document
from freight.data.load.microbatch import build_microbatch
from freight.data.pack.rows import Row
from freight.ops.attention_plan import document_pairs
from freight.ops.batch import IGNORE_INDEX, TokenBatch
from freight.train.flops import body_parameters, head_parameters


class Layout(NamedTuple):
    """One way to compute a step.

    Args:
        microbatches: What the model sees.
        attended: Tokens of each sequence as attention sees it, pads included where they are attended.
    """

    microbatches: list[TokenBatch]
    attended: list[int]


def packed(rows: Sequence[Row], pack_size: int) -> Layout:
    """One microbatch per row."""
    batches = [build_microbatch([row], num_rows=1, pack_size=pack_size) for row in rows]
    return Layout(batches, [length for batch in batches for length in batch.lengths])


def unpacked(documents: Sequence[Document], sequence_length: int) -> Layout:
    """One document per row; padding is no part of it."""
    return packed([_row(document, len(document)) for document in documents], sequence_length)


def padded(documents: Sequence[Document], sequence_length: int) -> Layout:
    """Every document padded to `sequence_length`, one per microbatch."""
    return _padded([[document] for document in documents], sequence_length)


def padded_to_longest(documents: Sequence[Document], documents_per_microbatch: int) -> Layout:
    """Every document padded to the longest of its microbatch, in the order given."""
    starts = range(0, len(documents), documents_per_microbatch)
    return _padded([documents[start : start + documents_per_microbatch] for start in starts], None)


def grouped_by_length(documents: Sequence[Document], documents_per_microbatch: int) -> Layout:
    """The same after sorting the step's documents by length: the best that padding can do."""
    return padded_to_longest(sorted(documents, key=len), documents_per_microbatch)


def executed_flops(arch: Architecture, layout: Layout) -> float:
    """Forward and backward FLOPs of a layout, from the shapes that ran.

    Linears see every token of the stream, attention every causal pair of what it takes for a sequence, and the head the
    tokens with a label: the same ones in every layout.
    """
    tokens = sum(batch.tokens for batch in layout.microbatches)
    return _flops(arch, tokens, layout.attended, layout.microbatches)


def useful_flops(arch: Architecture, documents: Sequence[Document], layout: Layout) -> float:
    """The same for nothing but real tokens and pairs inside documents."""
    lengths = [len(document) for document in documents]
    return _flops(arch, sum(lengths), lengths, layout.microbatches)


def _flops(arch: Architecture, tokens: int, lengths: Sequence[int], batches: Sequence[TokenBatch]) -> float:
    pairs = sum(document_pairs(n, window=arch.window_of(layer)) for n in lengths for layer in range(arch.num_layers))
    labels = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
    attention = 12.0 * arch.num_attention_heads * arch.dims_per_head * pairs
    return 6.0 * (body_parameters(arch) * tokens + head_parameters(arch) * labels) + attention


def _padded(groups: Sequence[Sequence[Document]], length: int | None) -> Layout:
    batches, attended = [], []
    for group in groups:
        size = length or max(len(document) for document in group)
        rows = [_row(document, size) for document in group]
        batches.append(build_microbatch(rows, num_rows=len(rows), pack_size=size))
        attended += [size] * len(rows)
    return Layout(batches, attended)


def _row(document: Document, size: int) -> Row:
    """A row of one sequence: the document, and pads that count as its tokens up to `size`."""
    pads = size - len(document)
    return Row(
        ids=np.pad(document.ids, (0, pads)),
        loss_mask=np.pad(document.loss_mask, (0, pads)),
        lengths=np.array([size]),
        tail_labels=np.array([NO_TAIL]),
        documents=np.array([0]),
    )
