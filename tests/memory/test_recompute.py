"""Recomputed blocks: bit-equal gradients, less kept, each block run once more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from freight.memory.recompute import RecomputeRunner
from freight.memory.stores import HostStore, Key, Slab, open_store
from freight.nn.block import Block, PlainRunner
from freight.nn.decoder import Decoder
from freight.ops.batch import TokenBatch
from tests.assemble.test_adapters import DOCUMENTS, model_of, settings
from tests.memory.running import PACKED, assert_equal, batch_of, freeze_all_but, gradients
from tests.nn.small_decoders import VARIANTS, build

INPUTS = {"input": Slab(8, 1 << 13)}
CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {name: VARIANTS[name] for name in ("llama", "gemma2", "neox", "qwen3")} | {
    "dropout": dict(attention_dropout=0.5, num_layers=3)
}


@pytest.fixture(params=["none", "host", "disk"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RecomputeRunner]:
    with open_store(request.param, INPUTS, directory=tmp_path) as store:
        yield RecomputeRunner(store)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_bits(name: str, runner: RecomputeRunner) -> None:
    model, _ = build(**MODELS[name])
    expected = gradients(model, PlainRunner(), batch_of(PACKED, 15))
    assert_equal(gradients(model, runner, batch_of(PACKED, 15)), expected)
    assert_equal(gradients(model, RecomputeRunner(), batch_of(PACKED, 15)), expected)


def test_generators_are_left_alone(runner: RecomputeRunner) -> None:
    model, _ = build(attention_dropout=0.5)
    before = torch.get_rng_state()
    gradients(model, runner, batch_of(PACKED))
    assert torch.equal(torch.get_rng_state(), before)


def test_autocast_around_forward_alone_is_entered_again(runner: RecomputeRunner) -> None:
    model, _ = build(attention_dropout=0.5)
    model = model.float()

    def run(runner: Any) -> dict[str, Tensor]:
        model.use_runner(runner)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch_of(PACKED)).objective
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    assert_equal(run(runner), run(PlainRunner()))


def count_runs(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers in the order in which their attention is computed."""
    runs: list[int] = []
    core = Block.core

    def counted(self: Block, *inputs: Any) -> Tensor:
        runs.append(self.attention.spec.layer)
        return core(self, *inputs)

    monkeypatch.setattr(Block, "core", counted)
    return runs


def test_every_block_runs_once_more(runner: RecomputeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build(num_layers=3)
    runs = count_runs(model, monkeypatch)
    gradients(model, runner, batch_of(PACKED))
    assert runs == [0, 1, 2, 2, 1, 0]


def test_without_gradients_blocks_run_once(runner: RecomputeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build()
    runs = count_runs(model, monkeypatch)
    model.use_runner(runner)
    with torch.no_grad():
        model(batch_of(PACKED))
    assert runs == [0, 1] and (runner.store is None or runner.store.bytes_out == 0)


def test_what_has_nothing_to_train_is_not_replayed(runner: RecomputeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build(num_layers=3)
    freeze_all_but(model, "layers.2")
    expected = gradients(model, PlainRunner(), batch_of(PACKED))
    runs = count_runs(model, monkeypatch)
    assert_equal(gradients(model, runner, batch_of(PACKED)), expected)
    assert runs == [0, 1, 2, 2]


def test_adapters_on_a_frozen_model_learn_the_same(mesh: DeviceMesh, runner: RecomputeRunner) -> None:
    def train(runner: Any) -> dict[str, Tensor]:
        model = model_of(settings({"target_modules": ["q_proj"], "dropout": 0.3}), mesh)
        model.use_runner(runner)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.5)
        for step in range(2):
            model(TokenBatch.from_documents(DOCUMENTS, step=step)).objective.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().to_local().clone() for name, p in model.named_parameters() if p.requires_grad}  # type: ignore[attr-defined]

    found, expected = train(runner), train(PlainRunner())
    assert_equal(found, expected)
    of_b = [value for name, value in found.items() if "lora_B" in name]
    assert of_b and all(value.count_nonzero() > 0.9 * value.numel() for value in of_b)


class Log(HostStore):
    """What was done with a store, in order."""

    def __init__(self) -> None:
        super().__init__(INPUTS, CPU)
        self.done: list[tuple[str, int]] = []

    def put(self, key: Key, tensor: Tensor) -> None:
        self.done.append(("put", key.owner))
        super().put(key, tensor)

    def prefetch(self, key: Key) -> None:
        self.done.append(("prefetch", key.owner))
        super().prefetch(key)

    def free(self, key: Key) -> None:
        self.done.append(("free", key.owner))
        super().free(key)


def test_inputs_come_back_one_group_ahead_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build(num_layers=3)
    with Log() as store:
        gradients(model, RecomputeRunner(store), batch_of(PACKED))
        begun = [owner for what, owner in dict.fromkeys(store.done) if what == "prefetch"]
        assert begun == [1, 0]
        assert store.done.index(("prefetch", 1)) < store.done.index(("free", 2))
        assert sorted(owner for what, owner in store.done if what == "free") == [0, 1, 2]
        assert not store._slots._taken


def test_a_graph_that_is_dropped_leaves_nothing() -> None:
    model, _ = build()
    with HostStore(INPUTS, CPU) as store:
        model.use_runner(RecomputeRunner(store))
        loss = model(batch_of(PACKED)).objective
        assert len(store._slots._taken) == 2
        del loss
        assert not store._slots._taken
