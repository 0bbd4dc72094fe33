"""The one attention primitive: a block of queries against a block of keys, forward and backward.

Packed documents, sliding windows and every later schedule are lists of such blocks. Forward returns the block's
log-sum-exp, with which blocks are merged; backward takes the *global* output and log-sum-exp of the rows, with which
the gradients of blocks simply add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from freight.ops.attention_backends import BACKENDS, Backend
from freight.ops.attention_kernels import BlockCall, Grads, Varlen
from freight.ops.attention_mask import CAUSAL, Mask, MaskKind, Rows, block_rows
from freight.ops.attention_math import BlockDropout, working_dtype

__all__ = ["Block", "Mask", "MaskKind", "PairDropout", "block_backward", "block_forward", "merge"]


@dataclass(frozen=True, eq=False)
class PairDropout:
    """Dropout of attention pairs as a function of their position.

    Args:
        rate: Share of pairs dropped, in [0, 1).
        seed_parts: Seed, step, microbatch and layer.
        first_head: Global number of the first query head.
        first_query: Position of the first row of q.
        first_key: Position of the first row of k.
        q_numbers: int64, position of every row of q, where they do not follow each other.
        k_numbers: The same of k.
    """

    rate: float
    seed_parts: tuple[int, ...]
    first_head: int = 0
    first_query: int = 0
    first_key: int = 0
    q_numbers: Tensor | None = None
    k_numbers: Tensor | None = None

    def of(self, q_rows: Rows, k_rows: Rows, device: torch.device) -> BlockDropout:
        """The dropout of one block."""
        q, k = q_rows.positions(device), k_rows.positions(device)
        q = q + self.first_query if self.q_numbers is None else self.q_numbers[q]
        k = k + self.first_key if self.k_numbers is None else self.k_numbers[k]
        return BlockDropout(self.rate, self.seed_parts, q, k, self.first_head)


@dataclass(frozen=True, eq=False)
class Block:
    """One launch on flat tensors: which rows it reads, what it sees, how the kernel is called.

    Args:
        mask: What is visible.
        q_rows: Rows of the queries in their tensor.
        k_rows: Rows of the keys in theirs.
        backend: Kernel.
        scale: Factor on scores.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        deterministic: Passed on to kernels that have both ways.
    """

    mask: Mask
    q_rows: Rows
    k_rows: Rows
    backend: Backend
    scale: float
    softcap: float | None = None
    deterministic: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, dropout: PairDropout | None = None) -> tuple[Tensor, Tensor]:
        """Flat q, k, v -> the batched rows' out `[n, width, heads, d]` and lse `[n, heads, width]`."""
        call = self._call(q.device, dropout)
        q, k, v = self.q_rows.take(q), self.k_rows.take(k), self.k_rows.take(v)
        if not self._flipped:
            return self.backend.forward(q, k, v, call)
        out, lse = self.backend.forward(q.flip(1), k.flip(1), v.flip(1), call)
        return out.flip(1), lse.flip(2)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dropout: PairDropout | None = None,
    ) -> Grads:
        """Flat tensors, `lse [tokens, heads]` -> gradients of the batched rows."""
        call = self._call(q.device, dropout)
        dout, q4, out = self.q_rows.take(dout, zero_padding=True), self.q_rows.take(q), self.q_rows.take(out)
        k4, v4, lse = self.k_rows.take(k), self.k_rows.take(v), self.q_rows.take(lse).transpose(1, 2)
        if not self._flipped:
            return self.backend.backward(dout, q4, k4, v4, out, lse, call)
        dout, q4, k4, v4, out = (x.flip(1) for x in (dout, q4, k4, v4, out))
        dq, dk, dv = self.backend.backward(dout, q4, k4, v4, out, lse.flip(2), call)
        return dq.flip(1), dk.flip(1), dv.flip(1)

    @cached_property
    def _flipped(self) -> bool:
        """`k >= q` is `k <= q` with both ranges read backwards; for kernels that know only the latter."""
        return self.mask.shape.kind == MaskKind.ANTICAUSAL and MaskKind.ANTICAUSAL not in self.backend.kinds

    def _call(self, device: torch.device, dropout: PairDropout | None) -> BlockCall:
        mask = CAUSAL if self._flipped else self.mask.shape
        varlen = None
        pairs = None if dropout is None else dropout.of(self.q_rows, self.k_rows, device)
        if self.mask.kind == MaskKind.DOCUMENTS and self.backend.varlen:
            borders = self.q_rows.cu_seqlens(device), self.k_rows.cu_seqlens(device)
            varlen = Varlen(*borders, self.q_rows.width, self.k_rows.width)
        return BlockCall(mask, self.scale, self.softcap, pairs, varlen, self.deterministic)


def block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    *,
    softcap: float | None = None,
    dropout: PairDropout | None = None,
    backend: Backend = BACKENDS["math"],
) -> tuple[Tensor, Tensor]:
    """Attention of one block.

    Args:
        q: `[tokens_q, heads, head_dim]`.
        k: `[tokens_k, groups, head_dim]`; query head i uses group `i // (heads / groups)`.
        v: Like k.
        mask: What is visible.
        scale: Factor on scores.
        softcap: Scores become `softcap * tanh(score / softcap)`, after scale and before the mask.
        dropout: Pairs dropped, by position in q and k.
        backend: Kernel.

    Returns:
        out like q, and lse `[heads, tokens_q]`: `log sum exp(scores)`, natural log, float32 (float64 for float64). A
        row that sees no key has out 0 and lse `-inf`.

    **Source**: FlashAttention-2, arXiv 2307.08691.
    """
    out = torch.zeros_like(q)
    lse = q.new_full((q.shape[0], q.shape[1]), float("-inf"), dtype=working_dtype(q.dtype))
    if q.shape[0] and k.shape[0]:
        block = _single_block(q, k, mask, scale, softcap, backend)
        block_out, block_lse = block.forward(q, k, v, dropout)
        block.q_rows.put(out, block_out)
        block.q_rows.put(lse, block_lse.transpose(1, 2))
    return out, lse.t().contiguous()


def block_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    scale: float,
    *,
    softcap: float | None = None,
    dropout: PairDropout | None = None,
    backend: Backend = BACKENDS["math"],
) -> Grads:
    """Gradients of one block.

    Args:
        dout: Gradient of the rows' output, like q.
        q: `[tokens_q, heads, head_dim]`.
        k: `[tokens_k, groups, head_dim]`.
        v: Like k.
        out: The rows' **global** output, over all blocks.
        lse: The rows' **global** log-sum-exp, `[heads, tokens_q]`.
        mask: What is visible.
        scale: Factor on scores.
        softcap: As in forward.
        dropout: As in forward.
        backend: Kernel.

    Returns:
        dq, dk, dv like q, k, v; summed over the blocks of a row (or key) they are the whole gradient.
    """
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if q.shape[0] and k.shape[0]:
        block = _single_block(q, k, mask, scale, softcap, backend)
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))  # exp(s - inf) = 0: such a row has no gradient
        parts = block.backward(dout, q, k, v, out, lse.t(), dropout)
        for rows, grad, part in zip((block.q_rows, block.k_rows, block.k_rows), grads, parts, strict=True):
            rows.put(grad, part)
    return grads


def _single_block(q: Tensor, k: Tensor, mask: Mask, scale: float, softcap: float | None, backend: Backend) -> Block:
    packed = mask.kind == MaskKind.DOCUMENTS and backend.varlen
    q_rows = block_rows(mask, q.shape[0], keys=False, packed=packed)
    k_rows = block_rows(mask, k.shape[0], keys=True, packed=packed)
    return Block(mask, q_rows, k_rows, backend, scale, softcap)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two key sets, from attention over each.

    `m = logaddexp(lse, block_lse)`, `out + (block_out - out) * exp(block_lse - m)`; exact for gaps of any size and for
    `-inf` on either side or both.

    Args:
        out: float32 or float64 `[..., head_dim]`.
        lse: `[...]`.
        block_out: Like out, any float dtype.
        block_lse: Like lse.
    """
    merged = torch.logaddexp(lse, block_lse)
    weight = torch.where(merged == float("-inf"), 0.0, torch.exp(block_lse - merged))
    return torch.lerp(out, block_out.to(out.dtype), weight.to(out.dtype).unsqueeze(-1)), merged
