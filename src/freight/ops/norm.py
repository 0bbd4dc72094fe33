"""RMSNorm and LayerNorm as autograd functions that keep their input and one or two statistics per row.

Composed from eager ops, a bfloat16 norm would keep a float32 twin of its input and sum gradients in another order when
it is replayed. These are the same function whether or not a runner discards their output, so recompute stays bit-exact.
Statistics and arithmetic are float32 (float64 for float64); the result is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool = False) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim.

    Args:
        x: `[..., size]`.
        weight: `[size]`.
        eps: Added to the mean square.
        offset: Multiply by `1 + weight` instead, as Gemma does.

    Source: arXiv 1910.07467.
    """
    return _RMSNorm.apply(x, weight, eps, offset)  # pyright: ignore[reportReturnType]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: bool = False) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dim.

    Args:
        x: `[..., size]`.
        weight: `[size]`.
        bias: `[size]` or None.
        eps: Added to the (biased) variance.
        offset: Multiply by `1 + weight` instead.

    Source: arXiv 1607.06450.
    """
    return _LayerNorm.apply(x, weight, bias, eps, offset)  # pyright: ignore[reportReturnType]


def _scale(weight: Tensor, dtype: torch.dtype, offset: bool) -> Tensor:
    return weight.to(dtype) + 1 if offset else weight.to(dtype)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in `dtype` that may be overwritten."""
    return x.to(dtype, copy=True)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return (x * inverse).mul_(_scale(weight, dtype, offset)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        scale = _scale(weight, inverse.dtype, ctx.offset)
        normed = x * inverse
        grad = _as(grads[0], inverse.dtype)
        return (*_finish(ctx, grad, normed, inverse, scale, weight, centre=False), None, None)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: bool) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean = x.mean(-1, keepdim=True, dtype=dtype)
        centred = x - mean
        norm = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.offset = offset
        out = centred.mul_(inverse).mul_(_scale(weight, dtype, offset))
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, mean, inverse = ctx.saved_tensors
        scale = _scale(weight, inverse.dtype, ctx.offset)
        normed = (x - mean).mul_(inverse)
        grad = _as(grads[0], inverse.dtype)
        d_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            d_bias = grad.flatten(0, -2).sum(0).to(bias.dtype)
        d_x, d_weight = _finish(ctx, grad, normed, inverse, scale, weight, centre=True)
        return d_x, d_weight, d_bias, None, None


def _finish(
    ctx: Any, grad: Tensor, normed: Tensor, inverse: Tensor, scale: Tensor, weight: Tensor, *, centre: bool
) -> tuple[Tensor | None, Tensor | None]:
    """`dx = (g - mean(g * n) n [- mean(g]) * inverse` with `g = grad * scale`; overwrites `grad` and `normed`."""
    d_weight = None
    if ctx.needs_input_grad[1]:
        d_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
    if not ctx.needs_input_grad[0]:
        return None, d_weight
    grad.mul_(scale)
    share = torch.linalg.vecdot(grad, normed).unsqueeze(-1).div_(-grad.shape[-1])
    if centre:
        grad.sub_(grad.mean(-1, keepdim=True))
    return grad.addcmul_(normed, share).mul_(inverse).to(ctx.saved_tensors[0].dtype), d_weight
