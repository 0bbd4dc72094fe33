"""Which pairs of one (query range, key range) block are visible, said in integers.

A mask is never a `[tokens_q, tokens_k]` tensor: a kernel is told a kind and at most a few numbers. `Rows` is the other
half: where the tokens of several equally treated segments lie in the flat stream, and how to bring them into the
batched `[segments, tokens, heads, head_dim]` form that kernels take. Evenly spaced segments are a view; others cost
one gather.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class MaskKind(StrEnum):
    """Shape of the visible pairs, in block-local indices q and k.

    `full`: all. `causal`: `k <= q`, square blocks only. `anticausal`: `k >= q`, square only; the far edge of a window.
    `window`: `q + offset - window < k <= q + offset`. `documents`: several segments of one of the other kinds.
    """

    FULL = "full"
    CAUSAL = "causal"
    ANTICAUSAL = "anticausal"
    WINDOW = "window"
    DOCUMENTS = "documents"


class Segment(NamedTuple):
    """Queries `[q_start, q_stop)` against keys `[k_start, k_stop)`, relative to the block."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


@dataclass(frozen=True)
class Mask:
    """What a block sees.

    Args:
        kind: Shape of the whole block.
        inner: Shape of each segment, for `documents`.
        window: Keys a query sees, for `window`.
        offset: First query's position minus first key's, for `window`.
        segments: For `documents`: query ranges that do not overlap, and their key ranges, which may.
    """

    kind: MaskKind
    inner: MaskKind = MaskKind.FULL
    window: int | None = None
    offset: int = 0
    segments: tuple[Segment, ...] = ()

    @property
    def shape(self) -> Mask:
        """The mask of one segment."""
        return Mask(self.inner, window=self.window, offset=self.offset) if self.segments else self

    def visible(self, q: int, k: int) -> bool:
        """Whether query q sees key k; the definition that everything else is tested against."""
        if self.kind == MaskKind.DOCUMENTS:
            return any(a <= q < b and c <= k < d and self.shape.visible(q - a, k - c) for a, b, c, d in self.segments)
        if self.kind == MaskKind.CAUSAL:
            return k <= q
        if self.kind == MaskKind.ANTICAUSAL:
            return k >= q
        if self.kind == MaskKind.WINDOW:
            return q + self.offset - (self.window or 0) < k <= q + self.offset
        return True


FULL = Mask(MaskKind.FULL)
CAUSAL = Mask(MaskKind.CAUSAL)
ANTICAUSAL = Mask(MaskKind.ANTICAUSAL)


class _Indices(NamedTuple):
    """Integers of `Rows` as tensors: all batched tokens, then the real ones among them."""

    flat: Tensor  # flat position of every batched token
    real: Tensor  # whether it is real
    real_batched: Tensor  # batched number of the real ones
    real_flat: Tensor  # their flat position


@dataclass(frozen=True, eq=False)
class Rows:
    """Segments of a flat stream, seen as a batch of `[segments, width]` tokens.

    Shorter segments are filled up at the tail with their own last token: its copies come later than every real query
    of a causal block, so no real query sees them, and no other document is read.

    Args:
        starts: First token of each segment.
        lengths: Tokens of each; at least 1.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    _on_device: dict[torch.device, _Indices] = field(default_factory=dict, repr=False)

    @cached_property
    def width(self) -> int:
        """Tokens of the longest segment."""
        return max(self.lengths)

    @cached_property
    def padded(self) -> bool:
        """Whether any segment is filled up."""
        return min(self.lengths) < self.width

    @cached_property
    def tokens(self) -> int:
        """Real tokens of all segments."""
        return sum(self.lengths)

    @cached_property
    def stride(self) -> int | None:
        """Even spacing of unpadded segments that do not overlap, which makes the batch a view; None otherwise."""
        if self.padded:
            return None
        steps = {b - a for a, b in pairwise(self.starts)} or {self.width}
        step = steps.pop()
        return step if not steps and step >= self.width else None

    def take(self, x: Tensor, *, zero_padding: bool = False) -> Tensor:
        """`[tokens, ...]` -> `[segments, width, ...]`."""
        if self.stride is not None:
            step, *inner = x.stride()
            return x.as_strided(
                (len(self.starts), self.width, *x.shape[1:]),
                (self.stride * step, step, *inner),
                x.storage_offset() + self.starts[0] * step,
            )
        indices = self._indices(x.device)
        out = x.index_select(0, indices.flat)
        if zero_padding and self.padded:
            out.mul_(indices.real.view(-1, *[1] * (x.dim() - 1)))
        return out.view(len(self.starts), self.width, *x.shape[1:])

    def put(self, target: Tensor, value: Tensor, *, add: bool = False) -> None:
        """Write `[segments, width, ...]` to its rows of `[tokens, ...]`, or add it; filled-up rows are dropped."""
        if self.stride is not None:
            view = self.take(target)
            view.add_(value) if add else view.copy_(value)
            return
        indices = self._indices(target.device)
        rows = value.reshape(-1, *value.shape[2:]).to(target.dtype)
        if self.padded:
            rows = rows.index_select(0, indices.real_batched)
        target.index_add_(0, indices.real_flat, rows) if add else target.index_copy_(0, indices.real_flat, rows)

    def positions(self, device: torch.device) -> Tensor:
        """int64 `[segments, width]`: flat position of every token."""
        return self._indices(device).flat.view(len(self.starts), self.width)

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """int32 `[segments + 1]`."""
        return torch.tensor(tuple(accumulate(self.lengths, initial=0)), dtype=torch.int32).to(device)

    def _indices(self, device: torch.device) -> _Indices:
        """Made once per device, on the CPU, so that nothing waits for a device."""
        if device not in self._on_device:
            starts, lengths = torch.tensor(self.starts).unsqueeze(1), torch.tensor(self.lengths).unsqueeze(1)
            column = torch.arange(self.width).unsqueeze(0)
            flat, real = (starts + torch.minimum(column, lengths - 1)).flatten(), (column < lengths).flatten()
            batched = real.nonzero().squeeze(1)
            tensors = (flat, real, batched, flat[batched])
            self._on_device[device] = _Indices(*(x.to(device) for x in tensors))
        return self._on_device[device]


@dataclass(frozen=True, eq=False)
class PackedRows(Rows):
    """The same segments one after another without filling: `[1, real tokens, ...]`, for kernels that take borders."""

    @cached_property
    def adjacent(self) -> bool:
        """Whether no gap lies between segments, so that all of them are one view."""
        return all(a + n == b for (a, b), n in zip(pairwise(self.starts), self.lengths, strict=False))

    def take(self, x: Tensor, *, zero_padding: bool = False) -> Tensor:
        """`[tokens, ...]` -> `[1, real tokens, ...]`."""
        if self.adjacent:
            return x[self.starts[0] : self.starts[0] + self.tokens].unsqueeze(0)
        return x.index_select(0, self._indices(x.device).real_flat).unsqueeze(0)

    def put(self, target: Tensor, value: Tensor, *, add: bool = False) -> None:
        """The inverse of `take`."""
        if self.adjacent:
            view = self.take(target)
            view.add_(value) if add else view.copy_(value)
            return
        index, rows = self._indices(target.device).real_flat, value[0].to(target.dtype)
        target.index_add_(0, index, rows) if add else target.index_copy_(0, index, rows)

    def positions(self, device: torch.device) -> Tensor:
        """int64 `[1, real tokens]`."""
        return self._indices(device).real_flat.unsqueeze(0)


def block_rows(mask: Mask, tokens: int, *, keys: bool, base: int = 0, packed: bool = False) -> Rows:
    """Rows of a block's queries or keys in a stream where the block begins at `base`."""
    form = PackedRows if packed else Rows
    if not mask.segments:
        return form((base,), (tokens,))
    pairs = [(s.k_start, s.k_stop) if keys else (s.q_start, s.q_stop) for s in mask.segments]
    return form(tuple(base + a for a, _ in pairs), tuple(b - a for a, b in pairs))
