"""A picture of chunk streaming: which keys each row of attention reads, in which order, and when they are freed.

It is drawn from what really happens: the rows of `RowAttention` go through `StoredKeyValues`, forward and backward,
over a store that writes down what is asked of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from freight.bench.svg import Picture
from freight.memory.key_values import StoredKeyValues
from freight.memory.stream import chunk_ranges
from freight.ops.attention import LocalAttention
from freight.ops.attention_rows import Row, RowAttention
from freight.ops.batch import TokenBatch
from freight.ops.protocols import AttentionSpec, Key, TensorStore

CHUNK = 4
DOCUMENTS = (14, 8, 10)


@dataclass
class Pass:
    """One direction.

    Args:
        parts: `(row, block)` in the order in which they run.
        freed: By block, the number of parts that had run when its keys were freed.
        row_freed: By block, the row after which that was.
    """

    parts: list[tuple[int, int]] = field(default_factory=list)
    freed: dict[int, int] = field(default_factory=dict)
    row_freed: dict[int, int] = field(default_factory=dict)


class RecordingStore:
    """Keeps tensors in a dict, and notes when keys go."""

    on_device = False

    def __init__(self, seen: Pass) -> None:
        self._tensors: dict[Key, Tensor] = {}
        self._seen = seen
        self.row = 0

    def put(self, key: Key, tensor: Tensor) -> None:
        """Keep it."""
        self._tensors[key] = tensor

    def prefetch(self, key: Key) -> None:
        """It is here."""

    def get(self, key: Key) -> Tensor:
        """What was kept."""
        return self._tensors[key]

    def accumulate(self, key: Key, tensor: Tensor) -> None:
        """Add to it."""
        self._tensors[key] = self._tensors[key] + tensor if key in self._tensors else tensor

    def free(self, key: Key) -> None:
        """Note it."""
        self._tensors.pop(key, None)
        if key.name == "k":
            self._seen.freed[key.chunk] = len(self._seen.parts)
            self._seen.row_freed[key.chunk] = self.row


def stream_passes() -> tuple[Pass, Pass]:
    """Forward and backward of one layer over the documents, as a streamed run does them."""
    batch = TokenBatch.from_documents([[0] * length for length in DOCUMENTS])
    attention = RowAttention(LocalAttention(), batch, AttentionSpec(scale=1.0), chunk_ranges(batch.tokens, CHUNK))
    like = torch.zeros(CHUNK, 1, 8)
    rows = attention.rows(like, like, by_block=True)
    return _forward(rows, like), _backward(rows, like)


def _forward(rows: tuple[Row, ...], like: Tensor) -> Pass:
    seen = Pass()
    store = RecordingStore(seen)
    keys = StoredKeyValues(rows, cast(TensorStore, store), 0, backward=False, keep=False)
    for row in rows:
        store.row = row.number
        keys.add(row.number, like, like)
        seen.parts += [(row.number, part.keys[0] // CHUNK) for part, _, _ in keys.parts(row)]
        keys.end_row(row)
    return seen


def _backward(rows: tuple[Row, ...], like: Tensor) -> Pass:
    seen = Pass()
    store = RecordingStore(seen)
    keys = StoredKeyValues(rows, cast(TensorStore, store), 0, backward=True, keep=False)
    for row in reversed(rows):
        store.row = row.number
        for chunk in range(row.keys[0] // CHUNK, row.number + 1):
            if not keys.has(chunk):
                keys.add(chunk, like, like)
        for part, _, _ in keys.parts(row):
            seen.parts.append((row.number, part.keys[0] // CHUNK))
            keys.close_gradients(part, keys.open_gradients(part))
        keys.end_row(row)
    return seen


def draw_stream(path: Path) -> None:
    """Both passes side by side."""
    chunks = -(-sum(DOCUMENTS) // CHUNK)
    cell, left, top, gap = 36, 84, 96, 110
    side = chunks * cell
    picture = Picture(left + 2 * side + gap + 20, top + side + 62, "Order of chunk streaming, forward and backward")
    lengths = ", ".join(map(str, DOCUMENTS))
    title = f"One layer, chunks of {CHUNK} tokens, documents of {lengths} tokens"
    picture.words(20, 26, title, kind="strong", size=14)
    picture.legend(
        20, 48, [(0, "the chunk's own keys"), (2, "keys of an earlier chunk"), (None, "nothing visible")], step=190
    )
    directions = ("forward: rows ascend", "backward: rows descend")
    for number, (seen, name) in enumerate(zip(stream_passes(), directions, strict=True)):
        _draw_pass(picture, seen, name, left + number * (side + gap), top, cell, chunks)
    note = "Numbers: order of launches. A bar: after this row the K, V are freed (backward: dK, dV are final)."
    picture.words(20, top + side + 48, note, kind="quiet", size=11)
    picture.write(path)


def _draw_pass(picture: Picture, seen: Pass, name: str, x: float, y: float, cell: float, chunks: int) -> None:
    picture.words(x, y - 24, name, kind="strong")
    order = {part: turn + 1 for turn, part in enumerate(seen.parts)}
    for row in range(chunks):
        picture.words(x - 8, y + row * cell + cell * 0.6, f"row {row}", kind="quiet", size=11, anchor="end")
        picture.words(x + (row + 0.5) * cell, y - 6, f"K,V {row}", kind="quiet", size=10, anchor="middle")
        for block in range(row + 1):
            turn = order.get((row, block))
            tone = None if turn is None else 0 if row == block else 2
            place = x + block * cell, y + row * cell
            picture.box(*place, cell - 3, cell - 3, tone, note=f"row {row}, keys of chunk {block}")
            if turn is not None:
                picture.words(
                    place[0] + cell / 2 - 1.5, place[1] + cell * 0.58, str(turn), kind="paper", anchor="middle"
                )
    for block, row in seen.row_freed.items():
        picture.box(
            x + block * cell, y + (row + 1) * cell - 3.5, cell - 3, 3, 3, note=f"K, V {block} freed after row {row}"
        )
