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


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        inverse = _inverse_rms(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype), x.shape[-1], eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return _copy(x, dtype).mul_(inverse).mul_(_scale(weight, dtype, offset)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = x, _, inverse = ctx.saved_tensors  # read once: recompute gives them only once
        normed = _copy(x, inverse.dtype).mul_(inverse)
        d_x, d_weight = _gradients(ctx, saved, grads[0].to(inverse.dtype), normed, centre=False)
        return d_x, d_weight, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: bool) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean = x.mean(-1, keepdim=True, dtype=dtype)
        centred = _copy(x, dtype).sub_(mean)
        inverse = _inverse_rms(torch.linalg.vector_norm(centred, dim=-1, keepdim=True), x.shape[-1], eps)
        ctx.save_for_backward(x, weight, inverse, mean)
        ctx.offset = offset
        ctx.bias_dtype = None if bias is None else bias.dtype
        out = centred.mul_(inverse).mul_(_scale(weight, dtype, offset))
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = x, _, inverse, mean = ctx.saved_tensors
        normed = _copy(x, inverse.dtype).sub_(mean).mul_(inverse)
        grad = grads[0].to(inverse.dtype)
        d_x, d_weight = _gradients(ctx, saved, grad, normed, centre=True)
        d_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return d_x, d_weight, d_bias, None, None


def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that may be overwritten: faster than an op on mixed dtypes."""
    return x.to(dtype, copy=True)


def _scale(weight: Tensor, dtype: torch.dtype, offset: bool) -> Tensor:
    return weight.to(dtype) + 1 if offset else weight.to(dtype)


def _inverse_rms(norm: Tensor, size: int, eps: float) -> Tensor:
    """`1 / sqrt(norm^2 / size + eps)`; overwrites `norm`."""
    return norm.square_().div_(size).add_(eps).rsqrt_()


def _gradients(
    ctx: Any, saved: tuple[Tensor, ...], grad: Tensor, normed: Tensor, *, centre: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Of input and weight, from n = `normed`, which is `x` (centred or not) times `inverse`.

    `dw = sum_rows(g n)`, `dx = (g w - n mean(g w n) [- mean(g w)]) inverse`; one product serves both.
    """
    x, weight, inverse, *_ = saved
    scale = _scale(weight, inverse.dtype, ctx.offset)
    product = grad * normed
    d_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
    if not ctx.needs_input_grad[0]:
        return None, d_weight
    share = (product @ scale).unsqueeze(-1).div_(-scale.shape[0])
    d_x = torch.mul(grad, scale, out=product)
    if centre:
        d_x.sub_(d_x.mean(-1, keepdim=True))
    return d_x.addcmul_(normed, share).mul_(inverse).to(x.dtype), d_weight
