"""Bytes of tensors alive at one time, as a CUDA allocator would count them; for devices that do not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While open, follows every tensor that an op returns.

    Args:
        counts: Whether a tensor counts; those on another tier do not.
    """

    def __init__(self, counts: Callable[[Tensor], bool] = lambda _: True) -> None:
        super().__init__()
        self._counts = counts
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {t.untyped_storage()._cdata for t in _dense((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _dense(result):
            if self._counts(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Bytes alive."""
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        return sum(size for _, size in self._alive.values())


def _dense(tree: Any) -> list[Tensor]:
    """Tensors with a storage; a sparse one is two others."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
