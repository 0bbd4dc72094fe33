"""Embedding lookups and their gradient."""

from __future__ import annotations

import pytest
import torch

from freight.ops.embedding import embedding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_value_and_gradient(dtype: torch.dtype) -> None:
    weight = torch.randn(9, 4, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.tensor([3, 3, 0, 8, 3])
    upstream = torch.randn(5, 4, dtype=torch.float64).to(dtype)
    out = embedding(ids, weight)
    assert torch.equal(out, weight[ids])
    out.backward(upstream)
    expected = torch.zeros(9, 4, dtype=torch.float64).index_add_(0, ids, upstream.double())
    assert weight.grad is not None and weight.grad.dtype == dtype
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(weight.grad.double(), expected, rtol=tolerance, atol=1e-6)


def test_a_frequent_token_gets_its_whole_gradient() -> None:
    """Summed in bfloat16, a thousand ones stop at 256."""
    weight = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    embedding(torch.ones(1000, dtype=torch.int64), weight).backward(torch.ones(1000, 2, dtype=torch.bfloat16))
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [0, 1000, 0]
