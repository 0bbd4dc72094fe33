"""A run that takes a second: a two-layer model on ten random documents, without files or tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freight.assemble.adapters import targets_for
from freight.assemble.build import architecture_for, model_tensors
from freight.config.load import config_from
from freight.config.schema import Config
from freight.data.documents import InMemoryDocuments, make_document
from freight.data.load.build import data_seed, pack_in_memory
from freight.ops.attention_backends import hardware_of
from freight.planner.resolve import data_facts, resolve
from freight.train import loop
from freight.train.launch import World
from freight.train.loop import Loop, TrainResult
from freight.train.optimizer import optimizer_state
from freight.train.run_record import RunRecord
from freight.train.setup import Prepared, build, build_loader
from freight.train.signals import StopSignals

WORLD = World(0, 1, torch.device("cpu"))
MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def config(run_dir: Path, **sections: dict[str, Any]) -> Config:
    """Three epochs of ten documents, two a step: fifteen steps. Sections are merged over the defaults."""
    raw: dict[str, Any] = {
        "model": MODEL,
        "data": {"train": "-", "tokenizer": "-", "sequence_length": 16, "num_workers": 0},
        "train": {
            "epochs": 3,
            "global_batch_size": 2,
            "optimizer": {"lr": 1e-2},
            "schedule": {"warmup_steps": 3},
            "precision": "fp32",
        },
        "log": {"dir": str(run_dir), "tensorboard": False},
    }
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values
    return config_from(raw)


def documents(count: int = 10, seed: int = 0) -> InMemoryDocuments:
    generator = np.random.default_rng(seed)
    return InMemoryDocuments(
        [make_document(generator.integers(1, 64, n), [True] * n) for n in generator.integers(4, 16, count)],
        {"vocab_size": 64, "pad_id": 0, "eos_id": 0, "format": "text", "sequence_length": 16, "truncation": "error"},
    )


def prepared(config: Config, world: World = WORLD) -> Prepared:
    """As `prepare`, with documents in memory."""
    arch = architecture_for(config)
    seed = data_seed(config.data, config.train.seed)
    rows = pack_in_memory(documents(), config.data, seed, shuffle=True)
    validation = None
    if config.data.validation is not None:
        validation = pack_in_memory(documents(6, seed=1), config.data, seed, shuffle=False)
    plan = resolve(
        config,
        arch,
        world_size=world.size,
        data=data_facts(rows),
        hardware=hardware_of(world.device),
        adapted=targets_for(config, arch),
    )
    data_rank = world.rank // config.parallel.context
    total_steps = build_loader(config, rows, plan, data_rank).total_steps
    return Prepared(config, arch, rows, validation, plan, total_steps, data_rank)


class TinyRun:
    """A run, its lines, the metrics of its steps and its tensors afterwards.

    Args:
        config: Of the run.
        checkpoint: To resume from.
        on_step: Called with the step's number.
        world: Of this rank.
    """

    def __init__(
        self,
        config: Config,
        *,
        checkpoint: Path | None = None,
        on_step: Callable[[int], None] = lambda _: None,
        world: World = WORLD,
    ) -> None:
        assert config.log.dir is not None
        run_dir = Path(config.log.dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.lines: list[str] = []
        self.metrics: dict[int, dict[str, float]] = {}
        ready = prepared(config, world)
        self._building = build(ready, world)
        self.trainable = self._building.__enter__()

        def show_step(step: int, total: int | None, metrics: Any, eta: float | None) -> None:
            self.metrics[step] = dict(metrics)
            on_step(step)

        directory = Path(config.checkpoint.dir) if config.checkpoint.dir else run_dir / "checkpoints"
        record = RunRecord(run_dir, self.lines.append, ready.total_steps, mute=not world.first)
        self.loop = Loop(ready, self.trainable, world, record, directory, show_step)
        if checkpoint is not None:
            self.loop.resume(checkpoint)

    def run(self) -> TrainResult:
        try:
            with StopSignals() as signals:
                return self.loop.run(signals)
        finally:
            self._building.__exit__(None, None, None)

    def values(self, name: str) -> list[float]:
        return [metrics[name] for metrics in self.metrics.values()]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and moments, whole."""
        state = optimizer_state(self.trainable.model, self.trainable.optimizer)
        moments = {f"{name}.{key}": value for name, values in state.items() for key, value in values.items()}
        whole = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value  # pyright: ignore
            for name, value in moments.items()
        }
        return {name: tensor.clone() for name, tensor in {**model_tensors(self.trainable.model), **whole}.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def no_peak(monkeypatch: Any) -> None:
    """Leave out the measurement of the machine, which takes longer than the run."""
    monkeypatch.setattr(loop, "device_peak", lambda *_: None)
