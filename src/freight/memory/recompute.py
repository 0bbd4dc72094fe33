"""Runs blocks keeping only their inputs, and runs them again in backward.

The replay is the same code on the same bits: attention drops by position and not by a generator's state, so gradients
are bit-equal to those of a plain run. The price is one more forward less its last GEMM, whose inputs are all that
backward needs of it. Inputs may go to a store, and come back one group ahead of the backward that needs them.

Source: arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from freight.ops.batch import BlockRecord, TokenBatch
from freight.ops.protocols import Key, RunnableBlock, TensorStore


class RecomputeRunner:
    """Recomputes every block in full, one by one; a `BlockRunner`.

    Args:
        store: Keeps the blocks' inputs, under the name `input`; None leaves them where they are.
        prefetch_groups: Inputs fetched ahead of the block that backward is at.
    """

    def __init__(self, store: TensorStore | None = None, prefetch_groups: int = 1) -> None:
        self.store = store
        self.prefetch_groups = prefetch_groups
        self._owners = count()
        self._stored: list[Key] = []  # in the order of forward

    def run(self, block: RunnableBlock, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """`[tokens, hidden]` -> `[tokens, hidden]`."""
        trained = hidden.requires_grad or any(parameter.requires_grad for parameter in block.parameters())
        if not (torch.is_grad_enabled() and trained):
            return _run(block, hidden, batch, BlockRecord())
        if self.store is None or self.store.on_device:
            return _replayed(block, batch, lambda: hidden)
        kept = _Kept(self, self.store, hidden)
        output = _replayed(block, batch, kept.input)
        kept.leave()
        return output

    def run_part(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Just the call."""
        return function(*inputs)

    def put(self, store: TensorStore, tensor: Tensor) -> Key:
        """Store a block's input."""
        key = Key("input", next(self._owners))
        store.put(key, tensor)
        self._stored.append(key)
        return key

    def get(self, store: TensorStore, key: Key) -> Tensor:
        """Fetch a block's input, and begin to fetch those that backward needs next."""
        tensor = store.get(key)
        place = self._stored.index(key)
        for earlier in self._stored[max(place - self.prefetch_groups, 0) : place]:
            store.prefetch(earlier)
        return tensor

    def free(self, store: TensorStore, key: Key) -> None:
        """Forget a block's input."""
        self._stored.remove(key)
        store.free(key)


class _Kept:
    """A block's input: here while forward runs, then in the store until the graph that needs it is gone."""

    def __init__(self, runner: RecomputeRunner, store: TensorStore, hidden: Tensor) -> None:
        self._runner, self._store = runner, store
        self._hidden: Tensor | None = hidden
        self._needs_grad = hidden.requires_grad
        self._key: Key | None = None

    def input(self) -> Tensor:
        if self._hidden is not None:
            return self._hidden
        assert self._key is not None
        return self._runner.get(self._store, self._key).detach().requires_grad_(self._needs_grad)

    def leave(self) -> None:
        if self._hidden is not None:
            self._key, self._hidden = self._runner.put(self._store, self._hidden), None

    def __del__(self) -> None:
        if self._key is not None:
            self._runner.free(self._store, self._key)


def _replayed(block: RunnableBlock, batch: TokenBatch, fetch: Callable[[], Tensor]) -> Tensor:
    """A run of a block that keeps nothing but `fetch`, which gives its input to every run."""
    record = BlockRecord()

    def run() -> Tensor:
        output = _run(block, fetch(), batch, record)
        record.replay = True
        return output

    # Nothing in a block draws from a generator, so no generator's state is saved.
    return checkpoint(run, use_reentrant=False, preserve_rng_state=False)


def _run(block: RunnableBlock, hidden: Tensor, batch: TokenBatch, record: BlockRecord) -> Tensor:
    tokens = batch.range(record=record)
    q, k, v = block.pre(hidden, tokens)
    return block.post(hidden, block.core(q, k, v, batch), tokens)
