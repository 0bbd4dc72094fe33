"""Running parts of a block again, one chunk after another, and summing what their backwards give."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freight.ops.attention_math import working_dtype


class GradientSums:
    """Gradients of parameters, summed over chunks in float32 (float64 for float64).

    A gradient is added as soon as it is known, so that beside the sums there is one at a time, not one of each weight.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, outputs: list[Tensor], grads: list[Tensor], inputs: list[Tensor]) -> list[Tensor | None]:
        """Differentiate outputs; returns the gradients of inputs (None where none is asked) and adds the others."""
        asked = [tensor for tensor in inputs if tensor.requires_grad]
        with ExitStack() as hooks:
            for i, parameter in enumerate(self._parameters):
                hooks.enter_context(parameter.register_hook(partial(self._take, i)))
            found = torch.autograd.grad(outputs, [*asked, *self._parameters], grads, allow_unused=True)
        of_inputs = iter(found[: len(asked)])
        return [next(of_inputs) if tensor.requires_grad else None for tensor in inputs]

    def rounded(self) -> list[Tensor | None]:
        """The sums in the parameters' dtypes; each is let go of when it has been rounded."""
        found: list[Tensor | None] = []
        for i, parameter in enumerate(self._parameters):
            total, self._sums[i] = self._sums[i], None
            found.append(None if total is None else total.to(parameter.dtype))
        return found

    def _take(self, i: int, grad: Tensor) -> Tensor | None:
        """Add one; autograd is left with a number in its place."""
        self._sums[i] = _added(self._sums[i], grad)
        return None if grad.is_sparse else grad.new_zeros(()).expand(grad.shape)


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
