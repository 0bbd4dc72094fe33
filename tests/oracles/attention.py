"""Attention as its definition says: every pair, one mask tensor, float64, autograd for the gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from freight.ops.attention_mask import Mask
from freight.ops.batch import TokenBatch
from freight.ops.protocols import AttentionSpec


def visible_pairs(batch: TokenBatch, *, causal: bool = True, window: int | None = None) -> Tensor:
    """bool `[tokens, tokens]`: query (row) sees key (column)."""
    seen = torch.zeros(batch.tokens, batch.tokens, dtype=torch.bool)
    for start, length in batch.spans:
        for q in range(length):
            for k in range(length):
                if not causal or (k <= q and (window is None or k > q - window)):
                    seen[start + q, start + k] = True
    return seen


def block_pairs(mask: Mask, tokens_q: int, tokens_k: int) -> Tensor:
    """bool `[tokens_q, tokens_k]` of one block's mask."""
    return torch.tensor([[mask.visible(q, k) for k in range(tokens_k)] for q in range(tokens_q)])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Context `[tokens_q, heads, d]` and lse `[heads, tokens_q]`; `factors [heads, q, k]` multiply probabilities."""
    shared = q.shape[1] // k.shape[1]
    k, v = (torch.stack([x[:, i // shared] for i in range(q.shape[1])], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.where(seen, torch.exp(scores), 0.0)
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total == 0, 1.0, total)
    if factors is not None:
        weights = weights * factors
    return torch.einsum("hqk,khd->qhd", weights, v), torch.log(total.squeeze(-1))


def attend_batch(q: Tensor, k: Tensor, v: Tensor, batch: TokenBatch, spec: AttentionSpec) -> Tensor:
    """Context of a whole batch."""
    seen = visible_pairs(batch, causal=spec.causal, window=spec.window)
    return attend(q, k, v, seen, spec.scale, spec.softcap)[0]


def gradients(context: Tensor, inputs: tuple[Tensor, ...], dout: Tensor) -> list[Tensor]:
    """Gradients of the inputs."""
    return list(torch.autograd.grad(context, inputs, dout))
