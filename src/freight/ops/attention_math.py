"""Attention written out: scores, softmax, sums. The reference for every kernel, and the only one with dropout.

Queries go in tiles of 256, so that scores take `heads * 256 * keys` numbers, and a tile of a causal block meets only
the keys it can see. Arithmetic is float32 (float64 for float64 inputs). Exact softcap and dropout come at 2-4 times
the time of a fused kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from freight.ops.attention_mask import Mask, MaskKind
from freight.ops.dropout import keep_mask, scaled_keep

TILE = 256


class BlockDropout(NamedTuple):
    """Dropout of one batched block.

    Args:
        rate: Share of pairs dropped.
        seed_parts: Seed, step, microbatch and layer.
        q_positions: int64 `[n, tokens_q]`, query positions in the microbatch.
        k_positions: int64 `[n, tokens_k]`.
        first_head: Global number of the first query head.
    """

    rate: float
    seed_parts: tuple[int, ...]
    q_positions: Tensor
    k_positions: Tensor
    first_head: int = 0

    def factors(self, heads: int, queries: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        """`[n, heads, queries, keys]` factors on probabilities."""
        rows = self.q_positions[:, None, queries]
        head = torch.arange(self.first_head, self.first_head + heads, device=rows.device).view(1, -1, 1)
        keep = keep_mask(self.seed_parts, rows + (head << 32), self.k_positions[:, None, keys], self.rate)
        return scaled_keep(keep, self.rate, dtype)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None, dropout: BlockDropout | None
) -> tuple[Tensor, Tensor]:
    """`q [n, tokens_q, heads, d]`, `k, v [n, tokens_k, groups, d]` -> out like q, lse `[n, heads, tokens_q]`."""
    queries, keys, values = _grouped(q, k.shape[2]), _heads_first(k), _heads_first(v)
    out = q.new_empty(q.shape, dtype=keys.dtype)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=keys.dtype)
    for rows, cols in _tiles(q.shape[1], k.shape[1], mask.kind):
        scores, _ = _scores(queries[:, :, :, rows], keys[:, :, cols], mask, rows, cols, scale, softcap)
        top = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        lse[:, :, rows] = _ungroup(total.log().add_(top)).squeeze(-1)
        if dropout is not None:
            weights = weights * _group(dropout.factors(q.shape[2], rows, cols, weights.dtype), k.shape[2])
        # A row that saw nothing has total 0 and weights 0: dividing by 1 leaves 0.
        context = _times_rows(weights, values[:, :, cols]).div_(total.masked_fill_(total == 0, 1.0))
        out[:, rows] = _ungroup(context).transpose(1, 2)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    scale: float,
    softcap: float | None,
    dropout: BlockDropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block given the rows' global `out` and `lse`; shapes as `forward`.

    `p = exp(s - lse)`, `D = rowsum(dout * out)`, `ds = p (dout v^T - D)`, `dq = scale ds k`, `dk = scale ds^T q`,
    `dv = p^T dout`; with softcap c, `ds` is further multiplied by `1 - (s / c)^2`.
    """
    groups = k.shape[2]
    queries, keys, values, grads = _grouped(q, groups), _heads_first(k), _heads_first(v), _grouped(dout, groups)
    outs, lses = _grouped(out, groups), _group(lse.to(keys.dtype), groups).unsqueeze(-1)
    dq = q.new_empty(q.shape, dtype=keys.dtype)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, cols in _tiles(q.shape[1], k.shape[1], mask.kind):
        query, grad = queries[:, :, :, rows], grads[:, :, :, rows]
        scores, slope = _scores(query, keys[:, :, cols], mask, rows, cols, scale, softcap)
        weights = scores.sub_(lses[:, :, :, rows]).exp_()
        dweights = _times_rows(grad, values[:, :, cols].transpose(-1, -2))
        dropped = weights
        if dropout is not None:
            factors = _group(dropout.factors(q.shape[2], rows, cols, weights.dtype), groups)
            dweights, dropped = dweights.mul_(factors), weights * factors
        dv[:, :, cols] += _sum_rows(dropped, grad)
        inner = (grad * outs[:, :, :, rows]).sum(-1, keepdim=True)
        dscores = dweights.sub_(inner).mul_(weights).mul_(scale)
        if slope is not None:
            dscores.mul_(slope)
        dk[:, :, cols] += _sum_rows(dscores, query)
        dq[:, rows] = _ungroup(_times_rows(dscores, keys[:, :, cols])).transpose(1, 2)
    return dq, dk.transpose(1, 2), dv.transpose(1, 2)


def _tiles(tokens_q: int, tokens_k: int, kind: MaskKind) -> list[tuple[slice, slice]]:
    """Query tiles and the keys that each can see."""
    tiles = []
    for start in range(0, tokens_q, TILE):
        stop = min(start + TILE, tokens_q)
        cols = {MaskKind.CAUSAL: slice(0, stop), MaskKind.ANTICAUSAL: slice(start, tokens_k)}
        tiles.append((slice(start, stop), cols.get(kind, slice(0, tokens_k))))
    return tiles


def _scores(
    query: Tensor, key: Tensor, mask: Mask, rows: slice, cols: slice, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Masked scores `[n, groups, heads / groups, rows, cols]` and, with softcap, the slope of the cap."""
    scores = _times_rows(query, key.transpose(-1, -2)).mul_(scale)
    slope = None
    if softcap is not None:
        capped = scores.div_(softcap).tanh_()
        slope = 1 - capped.square()
        scores = capped.mul_(softcap)
    hidden = _hidden(mask, rows, cols, scores.device)
    return (scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))), slope


def _hidden(mask: Mask, rows: slice, cols: slice, device: torch.device) -> Tensor | None:
    """Bool `[rows, cols]` of one tile: the pairs that are not visible; None if all are."""
    if mask.kind == MaskKind.FULL:
        return None
    q = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    k = torch.arange(cols.start, cols.stop, device=device).unsqueeze(0)
    if mask.kind == MaskKind.CAUSAL:
        return k > q
    if mask.kind == MaskKind.ANTICAUSAL:
        return k < q
    q = q + mask.offset
    return (k > q) | (k <= q - (mask.window or 0))


def _heads_first(x: Tensor) -> Tensor:
    """`[n, tokens, groups, d]` -> contiguous `[n, groups, tokens, d]` in the working dtype."""
    return x.transpose(1, 2).to(working_dtype(x.dtype)).contiguous()


def _grouped(x: Tensor, groups: int) -> Tensor:
    """`[n, tokens, heads, d]` -> `[n, groups, heads / groups, tokens, d]`, contiguous, in the working dtype."""
    return _group(_heads_first(x), groups)


def _group(x: Tensor, groups: int) -> Tensor:
    """`[n, heads, ...]` -> `[n, groups, heads / groups, ...]`."""
    return x.unflatten(1, (groups, -1))


def _ungroup(x: Tensor) -> Tensor:
    """`[n, groups, heads / groups, ...]` -> `[n, heads, ...]`."""
    return x.flatten(1, 2)


def _times_rows(x: Tensor, matrix: Tensor) -> Tensor:
    """`[n, groups, g, rows, a] x [n, groups, a, b]` -> `[n, groups, g, rows, b]`, one GEMM per group."""
    n, groups, g, rows, inner = x.shape
    return torch.matmul(x.reshape(n, groups, g * rows, inner), matrix).view(n, groups, g, rows, -1)


def _sum_rows(x: Tensor, y: Tensor) -> Tensor:
    """`[n, groups, g, rows, a], [n, groups, g, rows, b]` -> `[n, groups, a, b]`: summed over g and rows."""
    return torch.matmul(x.flatten(2, 3).transpose(-1, -2), y.flatten(2, 3))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
