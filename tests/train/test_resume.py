"""Claiming a run folder, choosing saved state, and living through a full disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from freight.checkpoint import saved_state
from freight.config.schema import OptimizerConfig
from freight.errors import CheckpointError, ConfigError
from freight.train.optimizer import build_optimizer
from freight.train.resume import (
    Counters,
    RunFailed,
    Saver,
    claim_run_folder,
    find_checkpoint,
    refuse_held_folder,
    restore,
    state_of,
)
from tests.train.tiny_run import config

ARCHITECTURE = {"num_layers": 1, "hidden_size": 4}


def small() -> tuple[nn.Module, Any]:
    model = nn.Linear(4, 3)
    return model, build_optimizer(model, OptimizerConfig(lr=0.1))


class Saving:
    """A saver and its warnings."""

    def __init__(self, directory: Path, keep: int = 1, asynchronous: bool = False) -> None:
        self.warnings: list[str] = []
        self.model, self.optimizer = small()
        self.saver = Saver(directory, keep, asynchronous=asynchronous, warn=self.warnings.append)

    def save(self, step: int) -> None:
        with torch.no_grad():
            self.model.bias.fill_(step)  # type: ignore[operator]
        counters = Counters(step=step, updates=step)
        self.saver.save(self.model, self.optimizer, counters, {"row": step}, {"architecture": ARCHITECTURE})
        self.saver.finish()


def steps(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("step"))


def test_a_folder_with_a_run_is_refused_unless_resumed_or_overwritten(tmp_path: Path) -> None:
    refuse_held_folder(tmp_path, resume=False, overwrite=False)
    (tmp_path / "rejects-train.jsonl").touch()
    refuse_held_folder(tmp_path, resume=False, overwrite=False)
    (tmp_path / "status.json").touch()
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume auto.*--overwrite"):
        refuse_held_folder(tmp_path, resume=False, overwrite=False)
    refuse_held_folder(tmp_path, resume=True, overwrite=False)
    refuse_held_folder(tmp_path, resume=False, overwrite=True)
    with pytest.raises(ConfigError, match="Give one of them"):
        refuse_held_folder(tmp_path, resume=True, overwrite=True)


def test_a_configuration_of_the_user_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"config\.yaml that is no run's"):
            refuse_held_folder(tmp_path, resume=False, overwrite=overwrite)


def test_overwriting_removes_the_old_run_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    Saving(checkpoints).save(1)
    (checkpoints / "mine").mkdir()
    for name in ("config.yaml", "status.json", "metrics.jsonl", "rejects-train.jsonl", "notes.txt"):
        (tmp_path / name).touch()
    claim_run_folder(tmp_path, checkpoints, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "notes.txt", "rejects-train.jsonl"]
    assert [path.name for path in checkpoints.iterdir()] == ["mine"]
    claim_run_folder(tmp_path / "new/folder", checkpoints, overwrite=False)
    assert (tmp_path / "new/folder").is_dir()


def test_state_goes_out_and_comes_back(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.model(torch.ones(4)).sum().backward()
    saving.optimizer.step()
    saving.save(7)
    model, optimizer = small()
    counters, loader = restore(tmp_path / "latest", model, optimizer, ARCHITECTURE, config(tmp_path))
    assert (counters, loader) == (Counters(7, 7, 0, 0), {"row": 7})
    before, after = state_of(saving.model, saving.optimizer), state_of(model, optimizer)
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])
    for name, values in before["optimizer"].items():
        assert {key: value.tolist() for key, value in values.items()} == {
            key: value.tolist() for key, value in after["optimizer"][name].items()
        }


def test_another_model_is_refused_by_the_key_that_differs(tmp_path: Path) -> None:
    Saving(tmp_path).save(1)
    with pytest.raises(CheckpointError, match=r"`model\.hidden_size` was 4, is 8"):
        restore(tmp_path / "latest", *small(), ARCHITECTURE | {"hidden_size": 8}, config(tmp_path))


def test_auto_takes_the_newest_that_verifies_and_says_so(tmp_path: Path) -> None:
    assert find_checkpoint("auto", tmp_path / "nothing", lambda _: None) is None
    saving = Saving(tmp_path, keep=2)
    saving.save(2)
    saving.save(4)
    damaged = next((tmp_path / "step-000004").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    warnings: list[str] = []
    assert find_checkpoint("auto", tmp_path, warnings.append) == tmp_path / "step-000002"
    assert len(warnings) == 1 and damaged.name in warnings[0]
    with pytest.raises(CheckpointError, match=damaged.name):
        find_checkpoint(str(tmp_path / "step-000004"), tmp_path, warnings.append)
    saving.save(4)
    assert find_checkpoint("auto", tmp_path, warnings.append) == tmp_path / "step-000004"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_save_keeps_the_one_before_and_two_in_a_row_stop(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, asynchronous=asynchronous)
    saving.save(2)
    full = True

    def write(*args: Any) -> None:
        if full:
            raise CheckpointError("step 4 could not be saved: No space left on device")
        written(*args)

    written = saved_state._write
    monkeypatch.setattr(saved_state, "_write", write)
    saving.save(4)
    assert steps(tmp_path) == ["step-000002"]
    assert len(saving.warnings) == 1 and "No space left on device" in saving.warnings[0]
    full = False
    saving.save(6)
    assert steps(tmp_path) == ["step-000006"]
    full = True
    saving.save(8)
    with pytest.raises(RunFailed, match=r"failed 2 times in a row.*No space left"):
        saving.save(10)
    assert steps(tmp_path) == ["step-000006"]


def test_checkpoints_of_a_course_that_is_left_are_set_aside(tmp_path):
    for step in (100, 400, 500):
        saved_state.save(tmp_path, step, {"model": {"w": torch.ones(2)}}, {}).wait()
    moved = saved_state.set_aside_after(tmp_path, 100)
    assert sorted(path.name for path in moved) == ["abandoned-step-000400", "abandoned-step-000500"]
    saved_state.save(tmp_path, 200, {"model": {"w": torch.ones(2)}}, {}).wait()
    saved_state.prune(tmp_path, 1)
    assert saved_state.newest_good(tmp_path, lambda _: None) == tmp_path / "step-000200"
    saved_state.save(tmp_path, 400, {"model": {"w": torch.ones(2)}}, {}).wait()
    assert [path.name for path in saved_state.set_aside_after(tmp_path, 300)] == ["abandoned-step-000400-2"]


def test_auto_refuses_to_start_over_when_every_checkpoint_is_damaged(tmp_path):
    saved_state.save(tmp_path, 4, {"model": {"w": torch.ones(2)}}, {}).wait()
    (tmp_path / "step-000004" / "meta.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"nothing to resume\. Start again with --overwrite"):
        find_checkpoint("auto", tmp_path, lambda _: None)
    assert find_checkpoint("auto", tmp_path / "new", lambda _: None) is None
