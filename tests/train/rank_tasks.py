"""Whole tiny runs on ranks; importable, because ranks are other processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from freight.train import loop
from freight.train.launch import launched
from tests.train.tiny_run import TinyRun, config

SECTIONS: dict[str, dict[str, Any]] = {
    "train": {"epochs": 4, "global_batch_size": 4, "micro_batch_tokens": 32, "evaluate_every_steps": 3},
    "data": {"validation": "-", "packing": {"algorithm": "first_fit_shuffle", "pack_size": 32}},
    "checkpoint": {"every_steps": 2, "keep": 9},
}


@dataclass
class Outcome:
    """What a run left on one rank: metrics by step, whole tensors, lines, the evaluation, how it ended."""

    metrics: dict[int, dict[str, float]]
    tensors: dict[str, Tensor]
    lines: list[str]
    evaluation: Any
    message: str
    exit_code: int


def run_tiny(run_dir: Path, sections: dict[str, Any], checkpoint: Path | None = None, stop_at: int = 0) -> Outcome:
    """A run on the ranks of the present group; rank 1 is asked to stop while it computes a step."""
    loop.device_peak = lambda *_: None  # the measurement takes longer than the run
    merged = {name: SECTIONS.get(name, {}) | sections.get(name, {}) for name in {*SECTIONS, *sections}}
    with launched() as world:
        tiny = TinyRun(config(run_dir, **merged), checkpoint=checkpoint, world=world)
        if world.rank == 1 and stop_at:
            _interrupt(tiny, stop_at)
        result = tiny.run()
        return Outcome(tiny.metrics, tiny.tensors(), tiny.lines, result.evaluation, result.message, result.exit_code)


def _interrupt(tiny: TinyRun, step: int) -> None:
    train = tiny.loop._train

    def interrupted(data: Any) -> Any:
        if tiny.loop.step + 1 == step:
            signal.raise_signal(signal.SIGTERM)
        return train(data)

    tiny.loop._train = interrupted  # type: ignore[method-assign]
