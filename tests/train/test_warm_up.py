"""The warm-up changes nothing: parameters, moments, gradients, generators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freight.train.warm_up import warm_up
from tests.train.tiny_run import TinyRun, config, same


@pytest.mark.usefixtures("mesh")
def test_nothing_is_changed(tmp_path: Path) -> None:
    tiny = TinyRun(config(tmp_path, fpdt={"chunk_tokens": 6}))
    before, generator = tiny.tensors(), torch.get_rng_state()
    calls: list[int] = []
    block = tiny.trainable.model.layers[0]
    block.register_forward_hook(lambda *args: calls.append(args[2].shape[0]))
    warm_up(tiny.trainable)
    assert calls == [6 + 4], "a chunk and one like the last, not the row of 16 tokens"
    assert same(tiny.tensors(), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in tiny.trainable.model.parameters())
