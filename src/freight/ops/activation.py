"""The nonlinearities of an MLP as autograd functions that keep only their inputs.

Written with eager ops, `silu(gate) * up` keeps three tensors of `[tokens, ffn]`; here it keeps the two that the GEMMs
produced, and backward recomputes the cheap one. Arithmetic is ATen's own kernels, in the input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freight.config.architecture import Activation

aten = torch.ops.aten


class _Curve(NamedTuple):
    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]  # (gradient of the value, input) -> gradient of the input


def _relu2_backward(grad: Tensor, x: Tensor) -> Tensor:
    return x.relu().mul_(grad).mul_(2)


_SILU = _Curve(torch.nn.functional.silu, lambda grad, x: aten.silu_backward(grad, x))
_GELU = _Curve(torch.nn.functional.gelu, lambda grad, x: aten.gelu_backward(grad, x))
_GELU_TANH = _Curve(
    lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
)
_RELU2 = _Curve(lambda x: x.relu().square_(), _relu2_backward)

_GATED = {"swiglu": _SILU, "geglu": _GELU, "geglu_tanh": _GELU_TANH}
_PLAIN = {"gelu": _GELU, "gelu_tanh": _GELU_TANH, "relu2": _RELU2}


def gated_activation(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """`f(gate) * up` with f = SiLU (swiglu), GELU (geglu) or its tanh form (geglu_tanh).

    Args:
        gate: `[..., ffn]`.
        up: As `gate`.
        kind: One of the three gated kinds.

    Source: arXiv 2002.05202.
    """
    return _Gated.apply(gate, up, _GATED[kind])  # pyright: ignore[reportReturnType]


def activation(x: Tensor, kind: Activation) -> Tensor:
    """`f(x)` with f = GELU (gelu), its tanh form (gelu_tanh) or `max(x, 0)^2` (relu2).

    Source: arXiv 1606.08415, 2109.08668.
    """
    return _Plain.apply(x, _PLAIN[kind])  # pyright: ignore[reportReturnType]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, curve: _Curve) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.curve = curve
        return curve.value(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        d_up = ctx.curve.value(gate).mul_(grads[0])
        return ctx.curve.backward(grads[0] * up, gate), d_up, None


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, curve: _Curve) -> Tensor:
        ctx.save_for_backward(x)
        ctx.curve = curve
        return curve.value(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return ctx.curve.backward(grads[0], x), None
