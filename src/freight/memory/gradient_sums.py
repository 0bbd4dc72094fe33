"""Running parts of a block again, one chunk after another, and summing what their backwards give."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from freight.ops.attention_math import working_dtype


class GradientSums:
    """Gradients of parameters, summed over chunks in float32 (float64 for float64)."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, outputs: list[Tensor], grads: list[Tensor], inputs: list[Tensor]) -> list[Tensor | None]:
        """Differentiate outputs; returns the gradients of inputs (None where none is asked) and adds the others."""
        asked = [tensor for tensor in inputs if tensor.requires_grad]
        found = torch.autograd.grad(outputs, [*asked, *self._parameters], grads, allow_unused=True)
        for i, grad in enumerate(found[len(asked) :]):
            if grad is not None:
                self._sums[i] = _added(self._sums[i], grad)
        of_inputs = iter(found[: len(asked)])
        return [next(of_inputs) if tensor.requires_grad else None for tensor in inputs]

    def rounded(self) -> list[Tensor | None]:
        """The sums in the parameters' dtypes."""
        return [None if s is None else s.to(p.dtype) for s, p in zip(self._sums, self._parameters, strict=True)]


def _added(total: Tensor | None, grad: Tensor) -> Tensor:
    """The sum with one more gradient, in place; a sparse gradient has one row per token."""
    dtype = working_dtype(grad.dtype)
    if not grad.is_sparse:
        return grad.to(dtype, copy=True) if total is None else total.add_(grad)
    if total is None:
        total = torch.zeros(grad.shape, dtype=dtype, device=grad.device)
    return total.index_add_(0, grad._indices()[0], grad._values().to(dtype))


class AutocastState:
    """The autocast state of a forward, to be entered again by its backward."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._enabled = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    def again(self) -> AbstractContextManager[Any]:
        """Without its cache of cast weights, whose graph the first chunk would use up."""
        return torch.autocast(self._device_type, self._dtype, self._enabled, cache_enabled=False)
