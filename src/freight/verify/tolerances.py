"""The one table of tolerances: how far two computations of the same thing may be apart.

A difference is measured against the largest reference value of the tensor, not element by element: rounding errors
scale with the terms of a sum, and an element near zero may be a sum of large ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

# |x - y| <= TOLERANCE * max(1, |y|max). float64 separates rounding (1e-15) from any wrong schedule by far; the others
# allow a few hundred units in the last place, the growth of rounding through a few layers.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 4e-2,
}

# Values given to six digits.
SIX_DIGITS = 1e-6


def difference(actual: Tensor, expected: Tensor) -> float:
    """`max |x - y| / max(1, max |y|)`, in float64; inf where one is not finite and the other differs."""
    x, y = actual.detach().double(), expected.detach().double()
    if x.shape != y.shape:
        return float("inf")
    if x.numel() == 0 or torch.equal(x, y):
        return 0.0
    gap = (x - y).abs().max().item() / max(1.0, y.abs().max().item())
    return gap if gap == gap else float("inf")


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether two tensors agree within the table's tolerance of `dtype`, by default the coarser of their own."""
    tolerance = max(TOLERANCES[d] for d in ((dtype,) if dtype else (actual.dtype, expected.dtype)))
    return difference(actual, expected) <= tolerance
