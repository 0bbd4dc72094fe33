"""How stored tensors lay out the weights of one or several projections.

Ours are one tensor per projection, `[out, in]` as in `nn.Linear`. A layout joins them into the stored form and splits
that form again; both directions only move numbers, so import followed by export gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """A stored form.

    Args:
        transposed: Matrices are stored `[in, out]`, as GPT-2's Conv1D does.
        fused: Parts stand one after another (`rows`), or per head: q, k, v of head 0, then of head 1 (`heads`).
    """

    transposed: bool = False
    fused: Literal["rows", "heads"] | None = None

    def shape(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of the stored tensor that holds parts of these shapes."""
        first = parts[0]
        joined = (sum(part[0] for part in parts), *first[1:])
        return joined[::-1] if self.transposed else joined

    def join(self, parts: Sequence[Tensor], head_dim: int) -> Tensor:
        """Parts `[out, in]` or `[out]` -> the stored tensor, contiguous."""
        if self.fused == "heads":
            # each [heads * head_dim, ...] -> [heads, 1, head_dim, ...] -> [heads * parts * head_dim, ...]
            joined = torch.stack([part.unflatten(0, (-1, head_dim)) for part in parts], dim=1).flatten(0, 2)
        else:
            joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        return (joined.T if self.transposed and joined.dim() == 2 else joined).contiguous()

    def split(self, stored: Tensor, parts: int, head_dim: int) -> list[Tensor]:
        """The stored tensor -> its parts, contiguous; the inverse of `join`."""
        if self.transposed and stored.dim() == 2:
            stored = stored.T
        if self.fused == "heads":
            pieces = [piece.flatten(0, 1) for piece in stored.unflatten(0, (-1, parts, head_dim)).unbind(1)]
        elif self.fused == "rows":
            pieces = list(stored.chunk(parts))
        else:
            pieces = [stored]
        return [piece.contiguous() for piece in pieces]


PLAIN = Layout()
CONV1D = Layout(transposed=True)
FUSED_CONV1D = Layout(transposed=True, fused="rows")
BY_HEAD = Layout(fused="heads")


def half_from_interleaved(tensor: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Reorder rows of a q or k projection, bias or norm from pairs `(2i, 2i + 1)` to pairs `(i, i + rotary_dim / 2)`.

    Args:
        tensor: `[heads * head_dim, ...]`, or `[head_dim]`.
        head_dim: Dims of a head.
        rotary_dim: Dims of a head that rotate; the rest stays in place.
    """
    heads = tensor.unflatten(0, (-1, head_dim))
    rotary, rest = heads[:, :rotary_dim], heads[:, rotary_dim:]
    return torch.cat([rotary[:, 0::2], rotary[:, 1::2], rest], dim=1).flatten(0, 1)


def interleaved_from_half(tensor: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """The inverse of `half_from_interleaved`."""
    heads = tensor.unflatten(0, (-1, head_dim))
    pairs = torch.stack([heads[:, : rotary_dim // 2], heads[:, rotary_dim // 2 : rotary_dim]], dim=2).flatten(1, 2)
    return torch.cat([pairs, heads[:, rotary_dim:]], dim=1).flatten(0, 1)
