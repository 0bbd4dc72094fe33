"""Linear layers and products: values, gradients, dtypes, on both kinds of CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from freight.ops import linear as module
from freight.ops.linear import bf16_units, fast_bf16, linear, matmul_float32

KINDS_OF_CPU = pytest.mark.parametrize("has_bf16", [False, True], ids=["without bf16", "with bf16"])


@pytest.fixture
def cpu(has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cpu_has_bf16", lambda: has_bf16)


def operands(dtype: torch.dtype, rows: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [(rows, 7), (5, 7), (5,)]
    x, w, b = (torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)
    return x, w, b


@KINDS_OF_CPU
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 12, 0])
def test_value_and_gradients(dtype: torch.dtype, biased: bool, rows: int) -> None:
    x, w, b = operands(dtype, rows)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    out = linear(x, w, b if biased else None)
    exact = F.linear(wide[0], wide[1], wide[2] if biased else None)
    assert out.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    upstream = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    count = 3 if biased else 2
    got = torch.autograd.grad(out, (x, w, b)[:count], upstream)
    expected = torch.autograd.grad(exact, wide[:count], upstream.double())
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("has_bf16", [False])
@pytest.mark.usefixtures("cpu")
def test_upcast_products_round_once() -> None:
    x, w, _ = operands(torch.bfloat16)
    exact = (x.double() @ w.double().t()).bfloat16()
    assert (linear(x, w) == exact).double().mean() > 0.95  # float32 sums land on the other side of a tie now and then


@pytest.mark.parametrize("has_bf16", [False])
@pytest.mark.usefixtures("cpu")
def test_upcasting_keeps_no_float32_copies() -> None:
    x, w, b = operands(torch.bfloat16)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        linear(x, w, b)
    assert kept == [x.data_ptr(), w.data_ptr()]


@pytest.mark.parametrize("has_bf16", [False])
@pytest.mark.usefixtures("cpu")
def test_frozen_operands_get_no_gradient() -> None:
    x, w, b = operands(torch.bfloat16)
    w.requires_grad_(False)
    linear(x, w, b).float().sum().backward()
    assert x.grad is not None and b.grad is not None and w.grad is None


@KINDS_OF_CPU
@pytest.mark.usefixtures("cpu")
def test_float32_products_of_bfloat16_are_not_rounded() -> None:
    a, b = torch.tensor([[6.0, 0.1]]).bfloat16(), torch.tensor([[6.0], [1.0]]).bfloat16()
    with bf16_units(a):
        out = matmul_float32(a, b)
    assert out.dtype == torch.float32
    assert out.item() == pytest.approx(36.1, abs=1e-3)
    assert (a @ b).item() == 36.0
    into = torch.empty(1, 1)
    assert matmul_float32(a, b, out=into) is into and into.item() == out.item()


@KINDS_OF_CPU
@pytest.mark.usefixtures("cpu")
def test_bf16_units_are_switched_on_for_bfloat16_alone_and_off_again(has_bf16: bool) -> None:
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    with pytest.raises(KeyError), bf16_units(torch.zeros(1, dtype=torch.bfloat16)):
        assert (setting.fp32_precision == "bf16") == has_bf16
        raise KeyError
    assert setting.fp32_precision == before
    with bf16_units(torch.zeros(1)):
        assert setting.fp32_precision == before


def test_devices_other_than_cpus_are_left_alone() -> None:
    assert fast_bf16(torch.device("cuda"))
    assert isinstance(fast_bf16(torch.device("cpu")), bool)
