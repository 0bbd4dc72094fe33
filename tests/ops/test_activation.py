"""Activations against their formulas: values, gradients and what they keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from freight.config.architecture import Activation
from freight.ops.activation import activation, gated_activation

erf: Callable[[Tensor], Tensor] = lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2  # noqa: E731
tanh: Callable[[Tensor], Tensor] = (  # noqa: E731
    lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
)
silu: Callable[[Tensor], Tensor] = lambda x: x / (1 + torch.exp(-x))  # noqa: E731
relu2: Callable[[Tensor], Tensor] = lambda x: x.clamp(min=0) ** 2  # noqa: E731
GATED: list[tuple[Activation, Callable[[Tensor], Tensor]]] = [("swiglu", silu), ("geglu", erf), ("geglu_tanh", tanh)]
PLAIN: list[tuple[Activation, Callable[[Tensor], Tensor]]] = [("gelu", erf), ("gelu_tanh", tanh), ("relu2", relu2)]


def sample(dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(6, 5, dtype=torch.float64) * 3).to(dtype).requires_grad_()


@pytest.mark.parametrize("kind, curve", GATED)
def test_gated_value_and_gradients(kind: Activation, curve: Callable[[Tensor], Tensor]) -> None:
    gate, up, upstream = sample(), sample(), torch.randn(6, 5, dtype=torch.float64)
    got, expected = gated_activation(gate, up, kind), curve(gate) * up
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        torch.autograd.grad(got, (gate, up), upstream), torch.autograd.grad(expected, (gate, up), upstream)
    )
    assert torch.autograd.gradcheck(lambda a, b: gated_activation(a, b, kind), (gate, up))


@pytest.mark.parametrize("kind, curve", PLAIN)
def test_plain_value_and_gradient(kind: Activation, curve: Callable[[Tensor], Tensor]) -> None:
    x = sample()
    torch.testing.assert_close(activation(x, kind), curve(x), rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(lambda a: activation(a, kind), (x,))


@pytest.mark.parametrize("kind, curve", GATED)
def test_gated_bfloat16_is_near(kind: Activation, curve: Callable[[Tensor], Tensor]) -> None:
    gate, up = sample(torch.bfloat16), sample(torch.bfloat16)
    got, exact = gated_activation(gate, up, kind), curve(gate.double()) * up.double()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("gated", [True, False])
def test_only_inputs_are_kept(gated: bool) -> None:
    gate, up = sample(), sample()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        gated_activation(gate, up, "swiglu") if gated else activation(gate, "relu2")
    assert kept == ([gate.data_ptr(), up.data_ptr()] if gated else [gate.data_ptr()])
