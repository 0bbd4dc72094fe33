"""Adapters that make the CPU's kernels look alike; those of CUDA stand in `attention_cuda.py`.

Each takes `q [n, tokens_q, heads, d]`, `k, v [n, tokens_k, groups, d]` and a `BlockCall`, and returns out in q's form
and lse `[n, heads, tokens_q]` (natural log); backward takes the *global* out and lse of the rows. With `varlen`, n is 1
and the tokens are several segments one after another. What a kernel cannot do (layout of lse, head_dim multiples,
shared KV heads) is put right here; what it must not be asked stands in the table of `attention_backends.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from freight.ops import attention_math
from freight.ops.attention_mask import Mask, MaskKind
from freight.ops.attention_math import BlockDropout
from freight.ops.linear import fast_bf16

aten = torch.ops.aten


class Varlen(NamedTuple):
    """Borders of segments that lie one after another: int32 `[segments + 1]` on the device, and the longest of each."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int


class BlockCall(NamedTuple):
    """How a block is computed: mask of one segment, factor on scores, and the rest."""

    mask: Mask
    scale: float
    softcap: float | None = None
    dropout: BlockDropout | None = None
    varlen: Varlen | None = None
    deterministic: bool = False

    @property
    def causal(self) -> bool:
        """Whether kernels are told `is_causal`; a native window is causal too."""
        return self.mask.kind in (MaskKind.CAUSAL, MaskKind.WINDOW)

    @property
    def window_left(self) -> int:
        """Keys before a query's own that it sees, as the flash kernels count; -1 = all."""
        return self.mask.window - 1 if self.mask.kind == MaskKind.WINDOW and self.mask.window else -1


Grads = tuple[Tensor, Tensor, Tensor]


def math_forward(q: Tensor, k: Tensor, v: Tensor, call: BlockCall) -> tuple[Tensor, Tensor]:
    """Explicit softmax."""
    return attention_math.forward(q, k, v, call.mask, call.scale, call.softcap, call.dropout)


def math_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: BlockCall) -> Grads:
    """Explicit gradients."""
    return attention_math.backward(dout, q, k, v, out, lse, call.mask, call.scale, call.softcap, call.dropout)


def cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, call: BlockCall) -> tuple[Tensor, Tensor]:
    """ATen's fused CPU kernel."""
    q, k, v = (_cpu_operand(x).transpose(1, 2) for x in (q, k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, call.causal, scale=call.scale)
    return out.transpose(1, 2), lse


def cpu_flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: BlockCall
) -> Grads:
    """ATen's fused CPU kernel."""
    dout, q, k, v, out = (_cpu_operand(x).transpose(1, 2) for x in (dout, q, k, v, out))
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, call.causal, scale=call.scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _cpu_operand(x: Tensor) -> Tensor:
    """16-bit operands in float32 where the CPU has no such arithmetic: the native backward takes 5-11 times as long."""
    native = x.dtype in (torch.float32, torch.float64) or (x.dtype == torch.bfloat16 and fast_bf16(x.device))
    return x if native else x.float()
