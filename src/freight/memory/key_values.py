"""Keys and values of one layer while its rows go by: in one buffer on the device, or block by block in a store.

The buffer holds only what later rows still see: with a sliding window or short documents its live part moves along the
stream, forward with the rows and backward with them. It is as long as the longest reach of a row, which for one causal
document is the whole stream. Blocks in a store cost two blocks of memory, and traffic quadratic in
the number of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from freight.ops.attention_math import working_dtype
from freight.ops.attention_plan import Range
from freight.ops.attention_rows import Row, RowPart
from freight.ops.protocols import Key, TensorStore

Pair = tuple[Tensor, Tensor]


class KeyValues(Protocol):
    """Where the keys and values of a layer are while its rows go by, ascending or, in backward, descending."""

    def add(self, chunk: int, k: Tensor, v: Tensor) -> None:
        """Keep those of one chunk, `[tokens, groups, head_dim]`."""
        ...

    def has(self, chunk: int) -> bool:
        """Whether they are kept."""
        ...

    def parts(self, row: Row) -> Iterator[tuple[RowPart, Tensor, Tensor]]:
        """A row's parts with their keys and values."""
        ...

    def open_gradients(self, part: RowPart) -> Pair:
        """Gradients dk and dv of a part, to add to until they are closed; float32 (float64 for float64)."""
        ...

    def close_gradients(self, part: RowPart, gradients: Pair) -> None:
        """Keep what was added."""
        ...

    def end_row(self, row: Row) -> None:
        """Forget what no later row needs."""
        ...

    def gradients(self, chunk: int) -> Pair:
        """Gradients dk and dv of a chunk whose row is the current one: finished, since all later rows are done."""
        ...


class ResidentKeyValues:
    """Keys and values in one buffer on the device; a `KeyValues`.

    Args:
        rows: All of a layer.
        backward: Rows come in descending order, and gradients are summed beside.
    """

    def __init__(self, rows: Sequence[Row], *, backward: bool) -> None:
        self.capacity = max(row.keys[1] - row.keys[0] for row in rows)
        self._rows, self._backward = rows, backward
        self._buffers: list[Tensor] = []  # k, v, and in backward dk, dv
        self._base = 0  # token at the buffers' first place
        self._held: Range = (0, 0)

    def add(self, chunk: int, k: Tensor, v: Tensor) -> None:
        """Copy them into the buffer, next to those of the neighbouring chunk."""
        start, stop = self._rows[chunk].queries
        if not self._buffers:
            self._buffers = [x.new_empty((self.capacity, *x.shape[1:])) for x in (k, v)]
            if self._backward:
                self._buffers += [zeros_for_gradient(buffer) for buffer in self._buffers]
            self._held = (stop, stop) if self._backward else (start, start)
            self._base = max(stop - self.capacity, 0) if self._backward else start
        self._cover((start, self._held[1]) if self._backward else (self._held[0], stop))
        for buffer, value in zip(self._buffers, (k, v), strict=False):
            buffer[start - self._base : stop - self._base] = value

    def has(self, chunk: int) -> bool:
        """Whether the buffer holds them."""
        start, stop = self._rows[chunk].queries
        return bool(self._buffers) and self._held[0] <= start and stop <= self._held[1]

    def parts(self, row: Row) -> Iterator[tuple[RowPart, Tensor, Tensor]]:
        """Views of the buffer."""
        for part in row.parts:
            k, v, *_ = self._views(part.keys)
            yield part, k, v

    def open_gradients(self, part: RowPart) -> Pair:
        """Views of the sums."""
        _, _, dk, dv = self._views(part.keys)
        return dk, dv

    def close_gradients(self, part: RowPart, gradients: Pair) -> None:
        """Nothing: they are views."""

    def end_row(self, row: Row) -> None:
        """Shrink the live part; its place is taken over when it is needed."""
        if self._backward:
            self._held = (self._held[0], row.queries[0])
        elif row.number + 1 < len(self._rows):
            self._held = (self._rows[row.number + 1].keys[0], self._held[1])

    def gradients(self, chunk: int) -> Pair:
        """Views of the sums."""
        _, _, dk, dv = self._views(self._rows[chunk].queries)
        return dk, dv

    def _views(self, tokens: Range) -> list[Tensor]:
        return [buffer[tokens[0] - self._base : tokens[1] - self._base] for buffer in self._buffers]

    def _cover(self, tokens: Range) -> None:
        """Hold a range that extends the held one, moving it to the other end of the buffers if there is no room."""
        if not self._base <= tokens[0] <= tokens[1] <= self._base + self.capacity:
            base = max(tokens[1] - self.capacity, 0) if self._backward else tokens[0]
            kept = [view.clone() for view in self._views(self._held)]
            for buffer in self._buffers[2:]:
                buffer.zero_()
            self._base = base
            for view, value in zip(self._views(self._held), kept, strict=True):
                view.copy_(value)
        self._held = tokens


class StoredKeyValues:
    """Keys and values of each chunk in a store, one block on the device and the next on its way; a `KeyValues`.

    Args:
        rows: All of a layer, by block.
        store: Of a tier.
        owner: Part of the keys.
        backward: Rows come in descending order, and gradients are summed in the store.
        keep: Leave keys and values in the store when forward is done with them, or find them there in backward.
    """

    def __init__(self, rows: Sequence[Row], store: TensorStore, owner: int, *, backward: bool, keep: bool) -> None:
        self._rows, self._store, self._owner = rows, store, owner
        self._backward, self._keep = backward, keep
        self._chunk = {row.queries: row.number for row in rows}
        self._last_row = {self._chunk[part.keys]: row.number for row in rows for part in row.parts}
        self._held = set(range(len(rows))) if backward and keep else set[int]()
        self._current: tuple[Tensor, ...] = ()  # k and v of the part that `parts` is at

    def add(self, chunk: int, k: Tensor, v: Tensor) -> None:
        """Write them behind."""
        self._held.add(chunk)
        self._store.put(self._key("k", chunk), k)
        self._store.put(self._key("v", chunk), v)

    def has(self, chunk: int) -> bool:
        """Whether they are in the store."""
        return chunk in self._held

    def parts(self, row: Row) -> Iterator[tuple[RowPart, Tensor, Tensor]]:
        """By descending keys: the row's own, which have just been put, need not come back from the store."""
        parts = row.parts[::-1]
        keys = [(self._key("k", chunk), self._key("v", chunk)) for chunk in (self._chunk[part.keys] for part in parts)]
        for part, pair, following in zip(parts, keys, [*keys[1:], ()], strict=False):
            k, v = (self._store.get(key) for key in pair)
            for key in following:
                self._store.prefetch(key)
            self._current = k, v
            yield part, k, v

    def open_gradients(self, part: RowPart) -> Pair:
        """Zeros; the sums are in the store."""
        return zeros_for_gradient(self._current[0]), zeros_for_gradient(self._current[1])

    def close_gradients(self, part: RowPart, gradients: Pair) -> None:
        """Add them to the sums."""
        for name, gradient in zip(("dk", "dv"), gradients, strict=True):
            self._store.accumulate(self._key(name, self._chunk[part.keys]), gradient)

    def end_row(self, row: Row) -> None:
        """Free blocks after their last row; in backward that is their own."""
        if self._backward:
            self._free(row.number, ("k", "v", "dk", "dv"))
        elif not self._keep:
            for chunk in [chunk for chunk in self._held if self._last_row.get(chunk, chunk) <= row.number]:
                self._free(chunk, ("k", "v"))

    def gradients(self, chunk: int) -> Pair:
        """From the store; zeros for a chunk of padding, which nothing sees."""
        seen = chunk in self._last_row
        first, second = (self._store.get(self._key(name, chunk)) for name in (("dk", "dv") if seen else ("k", "v")))
        return (first, second) if seen else (zeros_for_gradient(first), zeros_for_gradient(second))

    def _free(self, chunk: int, names: Sequence[str]) -> None:
        self._held.discard(chunk)
        for name in names:
            self._store.free(self._key(name, chunk))

    def _key(self, name: str, chunk: int) -> Key:
        return Key(name, self._owner, chunk)


def zeros_for_gradient(like: Tensor) -> Tensor:
    """Zeros to add gradients to: float32 (float64 for float64)."""
    return like.new_zeros(like.shape, dtype=working_dtype(like.dtype))
