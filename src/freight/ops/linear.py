"""Linear layers whose bfloat16 GEMMs are fast on any CPU.

A CPU without bfloat16 arithmetic (no AMX, no AVX512-BF16) runs a native bfloat16 GEMM at 17-20 GFLOP/s where float32
runs at 150 (two threads). There the bfloat16 operands are converted, multiplied in float32 and rounded once: the same
values or better, 8x faster, for one float32 copy of the operands that lives as long as the GEMM. Everywhere else this
is `F.linear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Below this many rows a GEMM reads each weight once and does little else; converting the weights would cost more.
FEW_ROWS = 8


@torch.compiler.assume_constant_result
def fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices at least as fast as float32 ones."""
    return device.type != "cpu" or _cpu_has_bf16()


@cache
def _cpu_has_bf16() -> bool:
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16"))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: `[tokens, in]`.
        weight: `[out, in]`.
        bias: `[out]` or None.
    """
    if x.dtype != torch.bfloat16 or fast_bf16(x.device) or (x.shape[0] < FEW_ROWS and not torch.is_grad_enabled()):
        return F.linear(x, weight, bias)
    return _UpcastLinear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]


class _UpcastLinear(torch.autograd.Function):
    """Keeps the bfloat16 operands and converts them again in backward: a conversion costs 2-4 % of its GEMM."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad = grads[0].float()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            (grad @ weight.float()).to(x.dtype) if needs_x else None,
            (grad.t() @ x.float()).to(weight.dtype) if needs_weight else None,
            grad.sum(0).to(ctx.bias_dtype) if needs_bias else None,
        )


@contextmanager
def bf16_units(operand: Tensor) -> Iterator[None]:
    """While open, float32 GEMMs of a CPU may round their operands to bfloat16, if `operand` is bfloat16 already.

    That is what a GEMM with bfloat16 operands and a float32 result is on such a CPU: no other op gives one. Does
    nothing where there is no bfloat16 arithmetic.
    """
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = matmul.fp32_precision
    if operand.dtype == torch.bfloat16 and operand.device.type == "cpu" and _cpu_has_bf16():
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def matmul_float32(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """`a @ b` of 16-bit matrices, accumulated and returned in float32; of others, in their own dtype.

    A 16-bit product would round 36.1 to 36.0, which a softmax over a vocabulary does not forgive.

    Args:
        a: `[m, k]`.
        b: `[k, n]`.
        out: `[m, n]` to write into.
    """
    if a.dtype not in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out=out)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32) if out is None else torch.mm(a, b, torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)
