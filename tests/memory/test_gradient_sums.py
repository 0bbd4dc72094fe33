"""Gradients of weights over chunks: sums as autograd has them, and one gradient beside the sums at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freight.memory.gradient_sums import GradientSums
from tests.memory.live_bytes import LiveBytes

WIDTH, WEIGHTS = 16, 6


def chain(x: Tensor, weights: list[nn.Parameter]) -> Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 4) for _ in range(WEIGHTS)]


def chunks(count: int = 3, tokens: int = 5) -> list[Tensor]:
    return [torch.randn(tokens, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def test_sums_and_gradients_of_inputs_are_autograds() -> None:
    of, rows = weights(), chunks()
    unused = nn.Parameter(torch.ones(2))
    sums = GradientSums([*of, unused])
    for row in rows:
        y = chain(row, of)
        (found,) = sums.add([y], [torch.ones_like(y)], [row])
        (wanted,) = torch.autograd.grad(chain(row, of).sum(), row)
        assert found is not None and torch.equal(found, wanted)
    wanted = torch.autograd.grad(sum((chain(row, of).sum() for row in rows), torch.zeros(())), of)
    *found, of_unused = sums.rounded()
    assert of_unused is None
    for got, want in zip(found, wanted, strict=True):
        assert got is not None
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_bf16_is_summed_in_float32_and_rounded_once() -> None:
    weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    sums = GradientSums([weight])
    for gradient in (256.0, 1.0, 1.0):  # each 1 alone is lost in bf16
        y = torch.ones(1, 1, dtype=torch.bfloat16) @ weight
        sums.add([y], [torch.full_like(y, gradient)], [])
    (found,) = sums.rounded()
    assert found is not None and found.dtype == torch.bfloat16 and found.item() == 258


def test_sparse_rows_are_added() -> None:
    table = nn.Parameter(torch.zeros(4, 2))
    sums = GradientSums([table])
    for ids in ([0, 3, 3], [3, 1, 1]):
        y = F.embedding(torch.tensor(ids), table, sparse=True)
        sums.add([y], [torch.ones_like(y)], [])
    (found,) = sums.rounded()
    assert found is not None and found[:, 0].tolist() == [1, 2, 0, 3]


def test_what_an_earlier_backward_left_and_later_hooks_are_not_touched() -> None:
    (weight, *_), (row, *_) = weights(), chunks()
    weight.grad = torch.full_like(weight, 7.0)
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    y = row @ weight
    sums = GradientSums([weight])
    sums.add([y], [torch.ones_like(y)], [row])
    (before,) = sums.rounded()
    assert before is not None and (weight.grad == 7).all()
    (row @ weight).sum().backward()  # the sums' own hooks are gone
    assert len(seen) == 2 and torch.equal(seen[1], before) and torch.equal(weight.grad, before + 7)


def test_beside_the_sums_there_is_one_gradient_at_a_time() -> None:
    of, (row, again) = weights(), chunks(2, tokens=1)
    size = 8 * WIDTH * WIDTH
    sums = GradientSums(of)
    with LiveBytes() as live:
        for x in (row, again):
            y = chain(x, of)
            sums.add([y], [torch.ones_like(y)], [x])
            del y
        rest = live.peak - WEIGHTS * size
    activations = 2 * (WEIGHTS + 2) * 8 * WIDTH
    assert size <= rest < 2 * size + activations
