"""The last linear layer and the cross-entropy behind it, without the logits between them.

Full logits are the largest tensor of small models: 8,192 tokens of a vocabulary of 49,152 are 1.6 GB in float32, three
times over with gradients. Here only rows with a label are multiplied, `chunk_tokens` at a time, and the gradients of a
chunk are computed while its logits exist (softmax minus target needs nothing else). So backward is two scalings, and
what is kept is the gradient of the hidden rows and of the weight, in float32. The price: gradients are computed even
if `backward` is never called on a result that had a graph.

Source: Liger Kernel, arXiv 2410.10989 (fused linear cross-entropy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freight.ops.batch import IGNORE_INDEX
from freight.ops.linear import bf16_units, matmul_float32
from freight.ops.protocols import LossSums


@dataclass(frozen=True)
class Recipe:
    """How the loss is computed; fields as the arguments of `linear_cross_entropy`."""

    chunk_tokens: int
    softcap: float | None
    label_smoothing: float
    z_loss_coeff: float | None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss_coeff: float | None = None,
) -> LossSums:
    """Cross-entropy of `softcap(hidden @ weight.T)` against labels, summed over the rows that have one.

    With logits l, `lse = logsumexp(l)` and V words: `nll = lse - l[label]`,
    `objective = (1 - label_smoothing) nll + label_smoothing (lse - mean(l)) + z_loss_coeff lse^2`.
    Logits and everything after them are float32 (float64 for float64).

    Args:
        hidden: `[tokens, hidden]`.
        weight: `[vocab, hidden]`.
        labels: int64 `[tokens]`; rows with `IGNORE_INDEX` are never computed.
        chunk_tokens: Rows whose logits exist at one time.
        softcap: `l -> softcap tanh(l / softcap)`; None = off.
        label_smoothing: Share of the target spread over the whole vocabulary.
        z_loss_coeff: Weight of the squared log-partition; None = off.

    Returns:
        Sums over label rows; both 0, `objective` with a graph, when there are none.

    Gradient: of `objective`, accumulated in float32 (float64 for float64) over chunks and rounded once.
    """
    recipe = Recipe(chunk_tokens, softcap, label_smoothing, z_loss_coeff)
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    objective, nll = _LinearCrossEntropy.apply(hidden, weight, labels, recipe, with_grad)  # pyright: ignore
    return LossSums(objective, nll)


@torch.no_grad()
def token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int, softcap: float | None = None
) -> Tensor:
    """Negative log-likelihood of each label, 0 where there is none; arguments as in `linear_cross_entropy`.

    Returns:
        float32 `[tokens]` (float64 for float64), without a graph.
    """
    rows = labelled(labels)
    with bf16_units(hidden):
        _, nll = run_chunks(hidden, weight, labels, rows, Recipe(chunk_tokens, softcap, 0.0, None), None, None)
    return nll.new_zeros(labels.shape[0]).index_copy_(0, rows, nll)


def labelled(labels: Tensor) -> Tensor:
    """int64 `[rows]`: the tokens that have a label."""
    return (labels != IGNORE_INDEX).nonzero().squeeze(-1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, recipe: Recipe, with_grad: bool
    ) -> tuple[Tensor, Tensor]:
        rows = labelled(labels)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight = (with_grad and need for need in ctx.needs_input_grad[:2])
        d_hidden = hidden.new_zeros(rows.shape[0], hidden.shape[1], dtype=dtype) if needs_hidden else None
        d_weight = weight.new_zeros(weight.shape, dtype=dtype) if needs_weight else None
        with bf16_units(hidden):
            objective, nll = run_chunks(hidden, weight, labels, rows, recipe, d_hidden, d_weight)
        ctx.save_for_backward(rows, d_hidden, d_weight)
        ctx.like = (hidden.shape, hidden.dtype, weight.dtype)
        objective, nll = objective.sum(), nll.sum()
        ctx.mark_non_differentiable(nll)
        return objective, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, d_hidden, d_weight = ctx.saved_tensors
        shape, hidden_dtype, weight_dtype = ctx.like
        if d_hidden is not None:
            scaled = (d_hidden * grads[0]).to(hidden_dtype)
            d_hidden = scaled.new_zeros(shape).index_copy_(0, rows, scaled)
        if d_weight is not None:
            d_weight = torch.mul(d_weight, grads[0], out=torch.empty_like(d_weight, dtype=weight_dtype))
        return d_hidden, d_weight, None, None, None


def run_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Tensor,
    recipe: Recipe,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    room: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Objective and nll `[rows]`, without a graph.

    Args:
        hidden: `[tokens, hidden]`.
        weight: `[vocab, hidden]`.
        labels: int64 `[tokens]`.
        rows: Tokens that have a label.
        recipe: Of the loss.
        d_hidden: float32 (float64) `[rows, hidden]`, to be overwritten with the objective's gradient at these tokens.
        d_weight: float32 (float64) `[vocab, hidden]`, to which the objective's gradient is added.
        room: Of `logits_room`, for at least as many rows as a chunk has; made here if None.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    objective, nll = hidden.new_zeros(2, rows.shape[0], dtype=dtype)
    if not rows.shape[0]:
        return objective, nll
    if hidden.device.type == "cpu":
        weight = weight.to(dtype)  # here, not in every chunk
    num_chunks = -(-rows.shape[0] // recipe.chunk_tokens)
    longest = -(-rows.shape[0] // num_chunks)
    room = logits_room(weight, longest, dtype) if room is None else room
    start = 0
    for chunk in rows.tensor_split(num_chunks):
        stop = start + chunk.shape[0]
        x = hidden.index_select(0, chunk).to(weight.dtype)
        logits = matmul_float32(x, weight.t(), out=room[: chunk.shape[0]])
        targets = labels.index_select(0, chunk)
        losses = _chunk_losses(logits, targets, recipe)
        objective[start:stop] = losses.objective.squeeze(-1)
        nll[start:stop] = losses.nll.squeeze(-1)
        if d_hidden is not None or d_weight is not None:
            d_logits = _chunk_slope(losses, targets, recipe).to(weight.dtype)
            if d_hidden is not None:
                d_hidden[start:stop] = matmul_float32(d_logits, weight)
            if d_weight is not None:
                _accumulate(d_weight, d_logits.t(), x)
        start = stop
    return objective, nll


def logits_room(weight: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Memory for logits `[rows, vocab]`, where the weight is: hidden states may lie on a tier."""
    return weight.new_empty(rows, weight.shape[0], dtype=dtype)


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += matmul_float32(a, b)


class _Chunk(NamedTuple):
    """What is left of a chunk's logits once its losses are known."""

    objective: Tensor  # [rows, 1]
    nll: Tensor  # [rows, 1]
    probabilities: Tensor  # [rows, vocab]
    lse: Tensor  # [rows, 1]
    bend: Tensor | None  # [rows, vocab], slope of the softcap


def _chunk_losses(logits: Tensor, labels: Tensor, recipe: Recipe) -> _Chunk:
    """Losses of each row; overwrites `logits` with their softmax."""
    bend = None
    if recipe.softcap is not None:
        bounded = logits.div_(recipe.softcap).tanh_()
        bend = bounded.square().neg_().add_(1)
        logits.mul_(recipe.softcap)
    smoothing = recipe.label_smoothing
    target = logits.gather(-1, labels[:, None])
    objective = target * (smoothing - 1)
    if smoothing:
        objective -= smoothing * logits.mean(-1, keepdim=True)
    largest = logits.amax(-1, keepdim=True)
    probabilities = torch.softmax(logits, -1, out=logits)
    # The largest probability is at least 1 / vocab: its logarithm never underflows, as the label's could.
    lse = largest - probabilities.amax(-1, keepdim=True).log_()
    objective += lse
    if recipe.z_loss_coeff is not None:
        objective += recipe.z_loss_coeff * lse.square()
    return _Chunk(objective, lse - target, probabilities, lse, bend)


def _chunk_slope(chunk: _Chunk, labels: Tensor, recipe: Recipe) -> Tensor:
    """Derivative of the objective at the raw logits `[rows, vocab]`; overwrites the probabilities."""
    slope = chunk.probabilities
    if recipe.z_loss_coeff is not None:
        slope.mul_(1 + 2 * recipe.z_loss_coeff * chunk.lse)
    if recipe.label_smoothing:
        slope.sub_(recipe.label_smoothing / slope.shape[-1])
    slope.scatter_add_(-1, labels[:, None], slope.new_full((labels.shape[0], 1), recipe.label_smoothing - 1))
    return slope if chunk.bend is None else slope.mul_(chunk.bend)
