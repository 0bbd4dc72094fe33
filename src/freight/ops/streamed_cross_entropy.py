"""The final norm and the cross-entropy behind it, some tokens of the hidden states at a time.

Neither the normed hidden states nor a gradient of full length is ever on the device: pieces come from a store and their
gradients go back to it. As in `linear_cross_entropy` gradients are computed in forward, while logits exist; backward
multiplies them by the incoming scalar, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from freight.ops.batch import IGNORE_INDEX
from freight.ops.cross_entropy import Recipe, logits_room, run_chunks
from freight.ops.linear import bf16_units
from freight.ops.protocols import LossSums, RowStore


@dataclass(frozen=True)
class RowStream:
    """Where hidden states lie, and how many tokens of them are on the device at one time.

    Args:
        store: Reads and keeps rows; gradients are lent under the name `hidden`.
        tokens: Of one piece.
    """

    store: RowStore
    tokens: int

    def pieces(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Rows of a tensor, in order, each with the one that follows."""
        pieces = whole.split(self.tokens)
        yield from zip(pieces, [*pieces[1:], None], strict=True)

    def read(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of a tensor and their values; the next ones are on their way meanwhile."""
        for piece, following in self.pieces(whole):
            value = self.store.read(piece)
            if following is not None and self.store.holds(following):
                self.store.fetch(following)
            yield piece, value


def streamed_cross_entropy(
    hidden: Tensor, norm: nn.Module, weight: Tensor, labels: Tensor, recipe: Recipe, stream: RowStream
) -> LossSums:
    """`linear_cross_entropy(norm(hidden), weight, labels)`, streamed.

    Args:
        hidden: `[tokens, hidden]`; may be lent by the stream's store.
        norm: Token-wise module.
        weight: `[vocab, hidden]`.
        labels: int64 `[tokens]`.
        recipe: Of the loss.
        stream: Pieces and their store.

    Returns:
        Sums over label rows, as `linear_cross_entropy`.

    Gradient: of `objective`; that of `hidden` is rounded to its dtype before and after the incoming scalar.
    """
    parameters = tuple(norm.parameters())
    with_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (hidden, weight, *parameters))
    return LossSums(*_Streamed.apply(hidden, weight, labels, norm, recipe, stream, with_grad, *parameters))  # pyright: ignore


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        norm: nn.Module,
        recipe: Recipe,
        stream: RowStream,
        with_grad: bool,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        needs = [needed and with_grad for needed in ctx.needs_input_grad]
        trained = [p for p, needed in zip(parameters, needs[7:], strict=True) if needed]
        sums = _Sums.zeros(weight, trained, needs_weight=needs[1])
        d_hidden = stream.store.lend("hidden", hidden, hidden.shape[0]) if needs[0] else None
        counts = _label_counts(labels, stream.tokens)
        longest = min(max(counts, default=0), recipe.chunk_tokens)
        room = logits_room(weight, longest, torch.promote_types(hidden.dtype, torch.float32))
        start = 0
        for count, (piece, values) in zip(counts, stream.read(hidden), strict=True):
            stop = start + piece.shape[0]
            d_piece = _add_piece(
                values, norm, weight, labels[start:stop], count, recipe, sums, room, needs_values=needs[0]
            )
            if d_hidden is not None and d_piece is not None:
                stream.store.write(d_hidden[start:stop], d_piece)
            start = stop
        ctx.stream, ctx.needs, ctx.kept = stream, needs, (d_hidden, sums, trained, weight.dtype)
        ctx.mark_non_differentiable(sums.nll)
        return sums.objective, sums.nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.kept is None:
            raise RuntimeError("backward ran through a streamed loss a second time; its gradients went with the first")
        (d_hidden, sums, trained, weight_dtype), ctx.kept = ctx.kept, None
        stream: RowStream = ctx.stream
        if d_hidden is not None:
            for piece, values in stream.read(d_hidden):
                stream.store.write(piece, values * grads[0].to(values.dtype))
            stream.store.settle()
        d_weight = sums.weight
        if d_weight is not None:
            d_weight = torch.mul(d_weight, grads[0], out=torch.empty_like(d_weight, dtype=weight_dtype))
        of_norm = iter([(total * grads[0]).to(p.dtype) for total, p in zip(sums.norm, trained, strict=True)])
        return d_hidden, d_weight, None, None, None, None, None, *(next(of_norm) if n else None for n in ctx.needs[7:])


@dataclass
class _Sums:
    """What is summed over pieces, in float32 (float64 for float64): the loss, and gradients of weights."""

    objective: Tensor
    nll: Tensor
    weight: Tensor | None
    norm: list[Tensor]
    trained: list[Tensor]

    @classmethod
    def zeros(cls, weight: Tensor, trained: list[Tensor], *, needs_weight: bool) -> _Sums:
        """Of a head's weight and the norm's trained parameters."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        objective, nll = torch.zeros(2, dtype=dtype, device=weight.device)
        of_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        return cls(objective, nll, of_weight, [torch.zeros_like(p, dtype=dtype) for p in trained], trained)


def _label_counts(labels: Tensor, tokens: int) -> list[int]:
    """Labels in each piece; the one time that the device is waited for."""
    return torch.stack([(piece != IGNORE_INDEX).sum() for piece in labels.split(tokens)]).tolist()


def _add_piece(
    values: Tensor,
    norm: nn.Module,
    weight: Tensor,
    labels: Tensor,
    count: int,
    recipe: Recipe,
    sums: _Sums,
    room: Tensor,
    *,
    needs_values: bool,
) -> Tensor | None:
    """Add a piece's loss and gradients; returns the gradient of its values, if asked for."""
    rows = torch.nonzero_static(labels != IGNORE_INDEX, size=count).squeeze(-1)
    with torch.enable_grad():
        x = values.index_select(0, rows).detach().requires_grad_(needs_values)
        normed = norm(x)
    inputs = [x, *sums.trained] if needs_values else sums.trained
    d_normed = torch.zeros_like(normed, dtype=sums.objective.dtype) if inputs else None
    with bf16_units(values):
        every = torch.arange(count, device=rows.device)
        objective, nll = run_chunks(normed.detach(), weight, labels[rows], every, recipe, d_normed, sums.weight, room)
    sums.objective, sums.nll = sums.objective + objective.sum(), sums.nll + nll.sum()
    if d_normed is None:
        return None
    found = list(torch.autograd.grad(normed, inputs, d_normed.to(normed.dtype)))
    d_values = torch.zeros_like(values).index_copy_(0, rows, found.pop(0)) if needs_values else None
    for total, grad in zip(sums.norm, found, strict=True):
        total += grad
    return d_values
