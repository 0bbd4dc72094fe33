"""Norms against their formulas: values, gradients, precision and what they keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from freight.ops.norm import layer_norm, rms_norm

EPS = 1e-3


def plain_rms(x: Tensor, w: Tensor, b: Tensor | None, offset: bool) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (w + 1 if offset else w)


def plain_layer(x: Tensor, w: Tensor, b: Tensor | None, offset: bool) -> Tensor:
    out = (x - x.mean(-1, keepdim=True)) / ((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    out = out * (w + 1 if offset else w)
    return out if b is None else out + b


def run_rms(x: Tensor, w: Tensor, b: Tensor | None, offset: bool) -> Tensor:
    return rms_norm(x, w, EPS, offset)


def run_layer(x: Tensor, w: Tensor, b: Tensor | None, offset: bool) -> Tensor:
    return layer_norm(x, w, b, EPS, offset)


Norm = Callable[[Tensor, Tensor, Tensor | None, bool], Tensor]
KINDS = pytest.mark.parametrize(
    "norm, plain, biased",
    [(run_rms, plain_rms, False), (run_layer, plain_layer, True), (run_layer, plain_layer, False)],
    ids=["rms", "layer", "layer without bias"],
)


def inputs(shape: tuple[int, ...], biased: bool, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, dtype=torch.float64, generator=generator) + 0.5
    w = torch.randn(shape[-1], dtype=torch.float64, generator=generator)
    tensors = [x, w] + ([torch.randn(shape[-1], dtype=torch.float64, generator=generator)] if biased else [])
    return [t.to(dtype).requires_grad_() for t in tensors]


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (3, 2, 4), (1, 1), (0, 6)])
@KINDS
def test_value_and_gradients_in_float64(
    norm: Norm, plain: Norm, biased: bool, shape: tuple[int, ...], offset: bool
) -> None:
    tensors = inputs(shape, biased, torch.float64)
    x, w, b = tensors if biased else (*tensors, None)
    torch.testing.assert_close(norm(x, w, b, offset), plain(x, w, b, offset), rtol=1e-13, atol=1e-13)
    upstream = torch.randn(shape, dtype=torch.float64)
    got = torch.autograd.grad(norm(x, w, b, offset), tensors, upstream)
    expected = torch.autograd.grad(plain(x, w, b, offset), tensors, upstream)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@KINDS
def test_gradcheck(norm: Norm, plain: Norm, biased: bool) -> None:
    tensors = inputs((3, 5), biased, torch.float64)
    assert torch.autograd.gradcheck(lambda x, w, b=None: norm(x, w, b, True), tensors)


@KINDS
def test_bfloat16_rounds_once(norm: Norm, plain: Norm, biased: bool) -> None:
    tensors = inputs((16, 256), biased, torch.bfloat16)
    x, w, b = tensors if biased else (*tensors, None)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    out, exact = norm(x, w, b, False), plain(*(wide if biased else (*wide, None)), False)  # type: ignore[arg-type, call-arg]
    upstream = torch.randn(16, 256).bfloat16()
    assert out.dtype == torch.bfloat16
    half_a_step = exact.abs() * 2**-8 + 1e-6
    assert ((out.double() - exact).abs() <= half_a_step).all()
    got = torch.autograd.grad(out, tensors, upstream)
    expected = torch.autograd.grad(exact, wide, upstream.double())
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=2e-3)


@KINDS
def test_only_inputs_and_statistics_are_kept(norm: Norm, plain: Norm, biased: bool) -> None:
    tensors = inputs((64, 32), biased, torch.bfloat16)
    x, w, b = tensors if biased else (*tensors, None)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x, w, b, False)
    new = [t for t in kept if all(t.data_ptr() != old.data_ptr() for old in tensors)]
    assert sum(t.numel() * t.element_size() for t in new) <= 64 * 4 * 2


@KINDS
def test_frozen_weight_gets_no_gradient(norm: Norm, plain: Norm, biased: bool) -> None:
    tensors = inputs((3, 4), biased, torch.float64)
    x, w, b = tensors if biased else (*tensors, None)
    w.requires_grad_(False)
    norm(x, w, b, False).sum().backward()
    assert x.grad is not None and w.grad is None


def test_a_second_derivative_is_refused_not_wrong() -> None:
    x, w = inputs((3, 4), False, torch.float64)
    (grad,) = torch.autograd.grad(rms_norm(x, w, EPS).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
