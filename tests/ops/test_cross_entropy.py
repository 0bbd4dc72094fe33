"""Chunked cross-entropy against torch's on full logits: values, gradients, precision, bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from freight.ops.cross_entropy import linear_cross_entropy, token_losses

Loss = Callable[..., Tensor]


def plain_objective(
    hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None, smoothing: float, z: float | None
) -> Tensor:
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    return loss if z is None else loss + z * logits.logsumexp(-1)[labels != -100].square().sum()


def one_row(logits: list[float], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Hidden and weight whose product is `logits`; the weight is what carries them."""
    return torch.ones(1, 1, dtype=dtype), torch.tensor(logits, dtype=dtype)[:, None]


@settings(max_examples=60)
@given(
    labels=st.lists(st.sampled_from([-100, -100, 0, 1, 5, 10]), min_size=1, max_size=13),
    chunk_tokens=st.integers(1, 14),
    softcap=st.sampled_from([None, 0.7, 5.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
    z=st.sampled_from([None, 1e-2]),
    scale=st.sampled_from([1.0, 30.0]),
)
def test_objective_nll_and_gradients(
    labels: list[int], chunk_tokens: int, softcap: float | None, smoothing: float, z: float | None, scale: float
) -> None:
    targets = torch.tensor(labels)
    generator = torch.Generator().manual_seed(len(labels))
    hidden = (scale * torch.randn(len(labels), 4, dtype=torch.float64, generator=generator)).requires_grad_()
    weight = torch.randn(11, 4, dtype=torch.float64, generator=generator).requires_grad_()
    sums = linear_cross_entropy(
        hidden, weight, targets, chunk_tokens=chunk_tokens, softcap=softcap, label_smoothing=smoothing, z_loss_coeff=z
    )
    expected = plain_objective(hidden, weight, targets, softcap, smoothing, z)
    torch.testing.assert_close(sums.objective, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums.nll, plain_objective(hidden, weight, targets, softcap, 0, None).detach())
    assert sums.objective.requires_grad and not sums.nll.requires_grad
    got = torch.autograd.grad(sums.objective / 7, (hidden, weight))
    torch.testing.assert_close(got, torch.autograd.grad(expected / 7, (hidden, weight)), rtol=1e-9, atol=1e-12)


def test_smoothing_goes_over_the_whole_vocabulary() -> None:
    hidden, weight = one_row([0, 1, 2, 3])
    sums = linear_cross_entropy(hidden, weight, torch.tensor([3]), chunk_tokens=4, label_smoothing=0.1)
    assert sums.nll.item() == pytest.approx(0.440190, abs=1e-6)
    assert sums.objective.item() == pytest.approx(0.590190, abs=1e-6)


def test_a_row_without_label_adds_nothing() -> None:
    hidden, weight = one_row([0, 1, 2, 3])
    both = hidden.repeat(2, 1).requires_grad_()
    weight.requires_grad_()
    sums = linear_cross_entropy(both, weight, torch.tensor([-100, 3]), chunk_tokens=1, label_smoothing=0.1)
    sums.objective.backward()
    assert sums.objective.item() == pytest.approx(0.590190, abs=1e-6)
    assert both.grad is not None and both.grad[0].item() == 0 and both.grad[1].item() != 0
    alone = weight.detach().clone().requires_grad_()
    linear_cross_entropy(hidden, alone, torch.tensor([3]), chunk_tokens=1, label_smoothing=0.1).objective.backward()
    torch.testing.assert_close(weight.grad, alone.grad, rtol=0, atol=0)


def test_softcap_of_logits_and_its_slope() -> None:
    hidden, weight = one_row([100.0, 0.0])
    weight.requires_grad_()
    sums = linear_cross_entropy(hidden, weight, torch.tensor([1]), chunk_tokens=1, softcap=30.0)
    assert sums.nll.item() == pytest.approx(29.923739, abs=1e-6)
    (grad,) = torch.autograd.grad(sums.objective, weight)
    assert grad[0].item() == pytest.approx(0.005078, abs=1e-6)


def test_bfloat16_logits_are_not_rounded() -> None:
    """36.1 in bfloat16 would be 36.0: the loss of the other word would be off by 0.1."""
    hidden = torch.tensor([[6.0, 0.1]]).bfloat16()
    weight = torch.tensor([[6.0, 1.0], [0.0, 0.0]]).bfloat16()
    sums = linear_cross_entropy(hidden, weight, torch.tensor([1]), chunk_tokens=1)
    assert sums.nll.dtype == torch.float32
    assert sums.nll.item() == pytest.approx(36.1, abs=1e-3)


def test_bfloat16_weight_gradient_is_summed_in_float32() -> None:
    """A thousand equal rows in chunks of one: in bfloat16 the sum would stop growing at 256 of them."""
    hidden = torch.ones(1000, 1).bfloat16()
    weight = torch.zeros(2, 1).bfloat16().requires_grad_()
    linear_cross_entropy(hidden, weight, torch.zeros(1000, dtype=torch.int64), chunk_tokens=1).objective.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert weight.grad[:, 0].tolist() == [-500, 500]


def test_an_improbable_label_has_a_finite_loss() -> None:
    """Its probability underflows float32; its loss does not."""
    hidden, weight = one_row([0.0, 400.0], torch.float32)
    weight.requires_grad_()
    sums = linear_cross_entropy(hidden, weight, torch.tensor([0]), chunk_tokens=1)
    sums.objective.backward()
    assert sums.nll.item() == 400.0
    assert weight.grad is not None and weight.grad[:, 0].tolist() == [-1, 1]


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_labels_give_zero_with_a_graph(dtype: torch.dtype, tokens: int) -> None:
    hidden = torch.randn(tokens, 4).to(dtype).requires_grad_()
    weight = torch.randn(5, 4).to(dtype).requires_grad_()
    sums = linear_cross_entropy(hidden, weight, torch.full((tokens,), -100), chunk_tokens=2)
    sums.objective.backward()
    assert sums.objective.item() == sums.nll.item() == 0
    assert hidden.grad is not None and weight.grad is not None
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_operands_cost_and_get_nothing(frozen: int) -> None:
    operands = [torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)]
    operands[frozen].requires_grad_(False)
    linear_cross_entropy(*operands, torch.tensor([1, -100, 4]), chunk_tokens=2).objective.backward()
    assert operands[frozen].grad is None and operands[1 - frozen].grad is not None


def test_backward_twice_gives_the_same() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    sums = linear_cross_entropy(hidden, weight, torch.tensor([1, -100, 4]), chunk_tokens=2)
    first = torch.autograd.grad(sums.objective / 3, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(sums.objective / 3, (hidden, weight))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_nonfinite_hidden_states_give_a_nonfinite_loss() -> None:
    hidden = torch.tensor([[math.nan, 0.0]], requires_grad=True)
    sums = linear_cross_entropy(hidden, torch.randn(3, 2), torch.tensor([1]), chunk_tokens=1)
    assert math.isnan(sums.objective.item())


def test_losses_of_single_tokens() -> None:
    hidden, weight = torch.randn(6, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    labels = torch.tensor([0, -100, 4, 2, -100, 1])
    got = token_losses(hidden, weight, labels, chunk_tokens=3, softcap=2.0)
    logits = 2 * torch.tanh(hidden @ weight.t() / 2)
    torch.testing.assert_close(got, F.cross_entropy(logits, labels, reduction="none"))
    assert not token_losses(hidden.requires_grad_(), weight, labels, chunk_tokens=3).requires_grad


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest storage that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.largest_bytes = max(self.largest_bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_chunk_of_logits_or_the_weight(dtype: torch.dtype) -> None:
    tokens, vocab, size, chunk_tokens = 512, 1000, 8, 32
    hidden = torch.randn(tokens, size).to(dtype).requires_grad_()
    weight = torch.randn(vocab, size).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,))
    with LargestTensor() as plain:
        F.cross_entropy((hidden @ weight.t()).float(), labels).backward()
    assert plain.largest_bytes >= tokens * vocab * 4
    with LargestTensor() as chunked:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens).objective.backward()
    assert chunked.largest_bytes == chunk_tokens * vocab * 4


def test_unlabelled_rows_are_not_computed() -> None:
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(300, 8)
    labels = torch.full((64,), -100)
    labels[5] = 3
    with LargestTensor() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=64).objective.backward()
    assert seen.largest_bytes <= weight.nbytes < 64 * 300 * 4
