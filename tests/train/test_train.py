"""`train` from files to a run folder: everything that must lie there, refusals that leave nothing, and resuming."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.device_mesh import DeviceMesh

from freight.config.load import config_from, load_config
from freight.config.schema import Config
from freight.errors import CheckpointError, ConfigError, DataError
from freight.train import loop
from freight.train.loop import TrainResult, train
from freight.train.metrics import read_metrics
from tests.train.tiny_run import MODEL, no_peak

WORDS = [f"w{number}" for number in range(60)]


@pytest.fixture(autouse=True)
def _world(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    no_peak(monkeypatch)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A tokenizer of words, and texts of a few of them."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (tmp_path / "tokenizer/tokenizer_config.json").write_text(json.dumps(settings))
    for name, first in (("train", 0), ("held", 30)):
        texts = [" ".join(WORDS[(first + i) % 60 :][: 4 + i % 7]) for i in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def config(files: Path, **train_keys: Any) -> Config:
    return config_from(
        {
            "model": MODEL,
            "data": {
                "train": str(files / "train.jsonl"),
                "validation": str(files / "held.jsonl"),
                "tokenizer": str(files / "tokenizer"),
                "sequence_length": 16,
                "packing": {"pack_size": 32, "algorithm": "first_fit_shuffle"},
                "cache_dir": None,
            },
            "train": {"epochs": 2, "global_batch_size": 1, "optimizer": {"lr": 1e-2}} | train_keys,
            "log": {"dir": str(files / "run"), "tensorboard": False},
        }
    )


def run(config: Config, lines: list[str] | None = None, **options: Any) -> TrainResult:
    return train(config, name="tiny", report_line=(lines if lines is not None else []).append, **options)


def test_a_run_folder_holds_everything_and_its_config_reads_back(files: Path) -> None:
    lines: list[str] = []
    result = run(config(files), lines)
    assert (result.exit_code, result.run_dir) == (0, files / "run")
    names = {path.name for path in result.run_dir.iterdir()}
    assert {
        "config.yaml", "environment.json", "metrics.jsonl", "data.json", "plan.txt", "status.json", "report.html",
        "checkpoints",
    } <= names  # fmt: skip
    again = load_config(result.run_dir / "config.yaml")
    assert again.model_dump() == config(files).model_dump()
    plan = (result.run_dir / "plan.txt").read_text().splitlines()
    at = lines.index(plan[0])
    assert lines[at : at + len(plan)] == plan
    assert "records: 12 read = 12 used + 0 left out" in lines[:at]
    assert json.loads((result.run_dir / "data.json").read_text())["documents"] == 12
    assert json.loads((result.run_dir / "status.json").read_text())["state"] == "finished"
    assert result.evaluation is not None
    assert result.evaluation.documents == 12


def test_a_second_run_needs_permission(files: Path) -> None:
    run(config(files, epochs=None, steps=1))
    with pytest.raises(ConfigError, match="already holds a run"):
        run(config(files))
    assert run(config(files, epochs=None, steps=2), overwrite=True).steps == 2
    assert [line["step"] for line in read_metrics(files / "run") if "train/loss" in line] == [1, 2]


def test_resuming_needs_no_path_and_ends_as_the_straight_run(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = run(config(files))
    losses = [line["train/loss"] for line in read_metrics(files / "run") if "train/loss" in line]
    stopped = run(
        config(files),
        overwrite=True,
        show_step=lambda step, *_: os.kill(os.getpid(), signal.SIGINT) if step == 3 else None,
    )
    assert (stopped.exit_code, stopped.steps) == (130, 3)
    resumed = run(load_config(files / "run/config.yaml"), resume="auto")
    assert (resumed.exit_code, resumed.steps) == (0, straight.steps)
    assert [line["train/loss"] for line in read_metrics(files / "run") if "train/loss" in line] == losses
    finished = run(config(files), resume="auto")
    assert (finished.exit_code, finished.steps) == (0, straight.steps)


def test_resuming_from_nothing_begins_and_from_a_wrong_path_is_refused(files: Path) -> None:
    with pytest.raises(CheckpointError, match="step-000009"):
        run(config(files), resume=str(files / "step-000009"))
    assert not (files / "run").exists()
    assert run(config(files, epochs=None, steps=1), resume="auto").steps == 1


def test_bad_input_leaves_nothing_behind(files: Path) -> None:
    (files / "train.jsonl").write_text('{"text": "w1 w2"}\n{"text":\n')
    with pytest.raises(DataError, match=r"train\.jsonl.*2"):
        run(config(files))
    assert not (files / "run/config.yaml").exists()
    (files / "train.jsonl").write_text('{"text": "w1 w2"}\n')
    with pytest.raises(ConfigError, match=r"warmup_steps.*must be at most the run's 2 steps"):
        run(config(files, schedule={"warmup_steps": 50}))
    assert not (files / "run/config.yaml").exists()


def test_a_failure_while_training_is_told_in_status_and_report(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DataError("train.jsonl:3: bad line")

    monkeypatch.setattr(loop, "train_step", fail)
    with pytest.raises(DataError):
        run(config(files))
    status = json.loads((files / "run/status.json").read_text())
    assert (status["state"], status["message"]) == ("failed", "DataError: train.jsonl:3: bad line")
    assert "bad line" in (files / "run/report.html").read_text()
