"""Every number is written once, survives a crash, and a resumed run continues the file without a gap or a repeat."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from freight.errors import ConfigError
from freight.train.metrics import METRICS_FILE, MetricLog, read_metrics


def write_steps(log: MetricLog, steps: range) -> None:
    for step in steps:
        log.write(step, {"train/loss": 1 / (step + 1)})


def test_a_line_per_step_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "run", tensorboard=False)
    log.write(1, {"train/loss": 2.5, "train/grad_norm": math.nan})
    lines = (tmp_path / "run" / METRICS_FILE).read_text().splitlines()
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert list(record) == ["step", "time", "train/loss", "train/grad_norm"]
    assert (record["step"], record["train/loss"]) == (1, 2.5)
    assert math.isnan(record["train/grad_norm"])
    log.close()


def test_resume_drops_later_steps_and_a_new_run_drops_all(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, tensorboard=False)
    write_steps(log, range(1, 8))
    log.close()
    log = MetricLog(tmp_path, tensorboard=False, resumed_step=5)
    write_steps(log, range(6, 9))
    log.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 8]
    MetricLog(tmp_path, tensorboard=False).close()
    assert read_metrics(tmp_path) == []


WHOLE_BUT_FOR_ITS_END = '{"step": 2, "train/loss": 0.25}'


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "train/lo', WHOLE_BUT_FOR_ITS_END, "\0\0\0\n", "[1]\n", '"text"\n', '{"no step": 1}\n']
)
def test_a_torn_line_costs_only_itself(tmp_path: Path, torn: str) -> None:
    log = MetricLog(tmp_path, tensorboard=False)
    write_steps(log, range(1, 3))
    log.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(torn)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    log = MetricLog(tmp_path, tensorboard=False, resumed_step=2)
    write_steps(log, range(3, 4))
    log.close()
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()] == [1, 2, 3]


def test_no_file_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, tensorboard=True)
    write_steps(log, range(1, 6))
    log.close()
    log = MetricLog(tmp_path, tensorboard=True, resumed_step=3)
    write_steps(log, range(4, 7))
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [event.step for event in scalars] == [1, 2, 3, 4, 5, 6]
    assert scalars[5].value == pytest.approx(1 / 7)


def test_wandb_that_is_not_installed_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'freight\[wandb\]'"):
        MetricLog(tmp_path, tensorboard=False, wandb={"project": "x"})


class FakeWandb(types.ModuleType):
    """Remembers what a run was given."""

    id = "abc123"

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []

    def init(self, **options: Any) -> FakeWandb:
        if "mode" in options:
            raise RuntimeError(f"no such\nmode {options['mode']}")
        self.calls.append(("init", options))
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, values)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_wandb_gets_options_configuration_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = MetricLog(tmp_path, tensorboard=False, wandb={"project": "x"}, config={"train": 1})
    log.write(3, {"train/loss": 2.0})
    log.close()
    assert fake.calls == [
        ("init", {"dir": str(tmp_path), "config": {"train": 1}, "project": "x"}),
        ("log", (3, {"train/loss": 2.0})),
        ("finish", None),
    ]


def test_a_resumed_run_continues_its_run_at_wandb_and_a_new_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    common = {"dir": str(tmp_path), "config": {}, "project": "x"}
    options: list[dict[str, Any]] = [
        {"wandb": {"project": "x"}},
        {"wandb": {"project": "x"}, "resumed_step": 3},
        {"wandb": {"project": "x", "id": "mine"}, "resumed_step": 3},
        {"wandb": {"project": "x"}},
    ]
    for each in options:
        MetricLog(tmp_path, tensorboard=False, **each).close()
    assert [values for name, values in fake.calls if name == "init"] == [
        common,
        {**common, "id": "abc123", "resume": "allow"},
        {**common, "id": "mine", "resume": "allow"},
        common,
    ]


def test_what_wandb_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    with pytest.raises(ConfigError, match=r"`log\.wandb`: wandb\.init refuses: no such mode x"):
        MetricLog(tmp_path, tensorboard=False, wandb={"mode": "x"})
