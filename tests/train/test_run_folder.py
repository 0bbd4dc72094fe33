"""The small files of a run: written whole or not at all, and read even when some are missing or torn."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from freight.train.metrics import MetricLog
from freight.train.run_folder import Run, RunStatus, add_warning, write_plan, write_status


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_status(tmp_path, RunStatus("interrupted", "continue with: --resume auto", 7, 20))
    add_warning(tmp_path, "first")
    add_warning(tmp_path, "zweite: Ä", step=7)
    write_plan(tmp_path, ["one row per microbatch", "", "no layer is recomputed"])
    run = Run.read(tmp_path)
    assert (run.status["state"], run.status["step"], run.status["total_steps"]) == ("interrupted", 7, 20)
    assert [(w["step"], w["message"]) for w in run.warnings] == [(0, "first"), (7, "zweite: Ä")]
    assert run.plan == ["one row per microbatch", "no layer is recomputed"]
    assert not list(tmp_path.glob("*.tmp"))


def test_an_empty_folder_is_a_run_of_nothing(tmp_path: Path) -> None:
    run = Run.read(tmp_path)
    assert (run.metrics, run.status, run.data, run.warnings, run.plan, run.config) == ([], {}, {}, [], [], "")


def test_a_torn_warning_is_passed_over(tmp_path: Path) -> None:
    add_warning(tmp_path, "whole")
    with (tmp_path / "warnings.jsonl").open("a") as file:
        file.write('{"step": 1, "mess')
    assert [w["message"] for w in Run.read(tmp_path).warnings] == ["whole"]


def test_points_of_a_metric_and_skipped_steps(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, tensorboard=False)
    log.write(1, {"train/loss": 3.0, "train/grad_norm": 1.0})
    log.write(2, {"train/loss": 2.0, "train/grad_norm": math.inf})
    log.write(2, {"eval/loss": 2.5})
    log.write(3, {"train/loss": math.nan, "train/grad_norm": math.nan})
    log.close()
    run = Run.read(tmp_path)
    assert run.points("eval/loss") == [(2.0, 2.5)]
    assert run.values("train/loss") == [3.0, 2.0]
    assert run.skipped_steps == [2, 3]


def test_status_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_status(tmp_path, RunStatus("running", step=1))

    def fail(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_status(tmp_path, RunStatus("finished", step=2))
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
