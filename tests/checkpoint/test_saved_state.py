"""Saved state: bit-exact, whole or not there, damage found and named, nothing deleted before its successor stands."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from freight.checkpoint import saved_state, whole_folder
from freight.checkpoint.completeness import verify
from freight.checkpoint.saved_state import load, newest_good, prune, save
from freight.errors import CheckpointError
from freight.parallel.data import shard
from tests.checkpoint.full_disk import largest_file


def make_state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "model": {"embed_tokens.weight": random(8, 4), "layers.0.mlp.up_proj.weight": random(6, 4)},
        "optimizer": {
            "embed_tokens.weight": {
                "exp_avg": random(8, 4),
                "exp_avg_sq": random(8, 4, dtype=torch.bfloat16),
                "step": torch.tensor(7 + seed),
            }
        },
        "schedule": {"step": 12 + seed, "lr": 0.1 + 0.2, "name": "wsd", "history": [1, None, True, float("inf")]},
    }


def blank(state: Any) -> Any:
    if isinstance(state, Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(value) for value in state] if isinstance(state, list) else None


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a == b and type(a) is type(b)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def shard_of(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*.distcp"))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_loaded_is_what_was_saved(asynchronous: bool, tmp_path: Path) -> None:
    state = make_state()
    pending = save(tmp_path, 500, state, {"loader": {"epoch": 1.5}}, asynchronous=asynchronous)
    if asynchronous:
        for tensor in (state["model"]["embed_tokens.weight"], state["optimizer"]["embed_tokens.weight"]["step"]):
            tensor.zero_()  # training goes on
    pending.wait()
    assert pending.done and pending.path == tmp_path / "step-000500"
    assert sorted(path.name for path in pending.path.iterdir()) == [
        ".metadata",
        "COMPLETE",
        "__0_0.distcp",
        "meta.json",
    ]
    assert (tmp_path / "latest").resolve() == pending.path
    restored = blank(make_state())
    assert load(tmp_path / "latest", restored) == {"loader": {"epoch": 1.5}}
    assert equal(restored, make_state())


def test_sharded_by_fsdp_on_a_world_of_one(mesh: DeviceMesh, tmp_path: Path) -> None:
    def wrapped() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        shard(model, list(model), mesh, "fp32")
        return model

    model, other = wrapped(), wrapped()
    names = dict(model.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in names.values())
    expected = {name: parameter.full_tensor().detach().clone() for name, parameter in names.items()}
    pending = save(tmp_path, 1, {"model": names}, {}, asynchronous=True)
    with torch.no_grad():
        for parameter in names.values():
            parameter.mul_(0.0)
    pending.wait()
    load(pending.path, {"model": dict(other.named_parameters())})
    assert all(torch.equal(p.full_tensor(), expected[name]) for name, p in other.named_parameters())
    plain = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(pending.path, {"model": plain})  # names and shapes know no layout
    assert equal(plain, expected)


class TestDamage:
    @pytest.fixture
    def steps(self, tmp_path: Path) -> Path:
        for step in (2, 4):
            save(tmp_path, step, make_state(step), {"step": step})
        return tmp_path

    def found(self, directory: Path) -> tuple[str | None, list[str]]:
        warnings: list[str] = []
        path = newest_good(directory, warnings.append)
        return path.name if path else None, warnings

    def test_none(self, steps: Path) -> None:
        assert self.found(steps) == ("step-000004", [])

    def test_a_shard_one_byte_short(self, steps: Path) -> None:
        damaged = shard_of(steps / "step-000004")
        size = damaged.stat().st_size
        os.truncate(damaged, size - 1)
        name, warnings = self.found(steps)
        assert name == "step-000002" and len(warnings) == 1
        assert f"`{damaged}` is damaged: {size - 1} bytes instead of {size}" in warnings[0]
        with pytest.raises(CheckpointError, match="is damaged"):
            load(steps / "step-000004", blank(make_state()))

    @pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "meta.json"])
    def test_one_bit(self, steps: Path, file: str) -> None:
        damaged = steps / "step-000004" / file
        flip(damaged, damaged.stat().st_size // 2)
        name, warnings = self.found(steps)
        assert name == "step-000002" and file in warnings[0]

    def test_a_missing_file(self, steps: Path) -> None:
        shard_of(steps / "step-000004").unlink()
        name, warnings = self.found(steps)
        assert name == "step-000002" and "is missing" in warnings[0]

    def test_the_marker(self, steps: Path) -> None:
        (steps / "step-000004/COMPLETE").write_text("{")
        assert self.found(steps)[0] == "step-000002"
        (steps / "step-000004/COMPLETE").unlink()
        assert "has no COMPLETE" in self.found(steps)[1][0]

    def test_every_one(self, steps: Path) -> None:
        for path in steps.glob("step-*"):
            (path / "COMPLETE").unlink()
        assert self.found(steps)[0] is None and len(self.found(steps)[1]) == 2

    def test_no_directory(self, tmp_path: Path) -> None:
        assert self.found(tmp_path / "none") == (None, [])

    def test_an_index_that_would_run_code(self, steps: Path) -> None:
        class Evil:
            def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
                return os.mkdir, (str(steps / "ran"),)

        (steps / "step-000004/.metadata").write_bytes(pickle.dumps(Evil()))
        with pytest.raises(CheckpointError, match=r"asks for posix\.mkdir"):
            load(steps / "step-000004", blank(make_state()), verified=True)
        assert not (steps / "ran").exists()


class TestInterruptedSaves:
    def failing(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        """After the first file is written, the save fails."""

        def finish(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(FileSystemWriter, "finish", finish)

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_full_disk_leaves_the_earlier_one(
        self, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(tmp_path, 2, make_state(2), {})
        with monkeypatch.context() as patch:
            self.failing(patch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            with pytest.raises(CheckpointError, match=r"step 4 could not be saved .* No space left on device") as error:
                save(tmp_path, 4, make_state(4), {}, asynchronous=asynchronous).wait()
        assert "\n" not in str(error.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000002"]
        assert newest_good(tmp_path, pytest.fail) == tmp_path / "step-000002"
        save(tmp_path, 4, make_state(4), {})  # the same step can be saved again
        assert newest_good(tmp_path, pytest.fail) == tmp_path / "step-000004"

    def test_a_file_that_cannot_grow(self, tmp_path: Path) -> None:
        save(tmp_path, 2, make_state(2), {})
        with largest_file(500), pytest.raises(CheckpointError, match=r"step 4 could not be saved .* File too large"):
            save(tmp_path, 4, make_state(4), {})
        assert newest_good(tmp_path, pytest.fail) == tmp_path / "step-000002"

    def test_a_killed_process_leaves_a_folder_that_is_named_and_removed(self, tmp_path: Path) -> None:
        save(tmp_path, 2, make_state(2), {})
        stale = tmp_path / f".step-000004{whole_folder.UNFINISHED}"
        stale.mkdir()
        (stale / "__0_0.distcp").write_bytes(b"half")
        warnings: list[str] = []
        assert newest_good(tmp_path, warnings.append) == tmp_path / "step-000002"
        assert len(warnings) == 1 and stale.name in warnings[0]
        save(tmp_path, 6, make_state(6), {})
        assert not stale.exists()

    def test_a_directory_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="Not a directory"):
            save(tmp_path / "file", 1, make_state(), {})

    def test_the_same_step_replaces_itself(self, tmp_path: Path) -> None:
        save(tmp_path, 4, make_state(1), {})
        save(tmp_path, 4, make_state(2), {})
        restored = blank(make_state())
        load(tmp_path / "step-000004", restored)
        assert equal(restored, make_state(2))

    def test_saves_of_one_directory_wait_for_each_other(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, order = threading.Event(), []
        marked = saved_state.mark_complete

        def slow(folder: Path) -> None:
            if not order:
                gate.wait(20)
            order.append(folder.name)
            marked(folder)

        monkeypatch.setattr(saved_state, "mark_complete", slow)
        first = save(tmp_path, 2, make_state(), {}, asynchronous=True)
        assert not first.done
        threading.Timer(0.2, gate.set).start()
        save(tmp_path, 4, make_state(), {})
        assert first.done and [name[:12] for name in order] == [".step-000002", ".step-000004"]


class TestPrune:
    def test_keeps_the_newest_complete_ones(self, tmp_path: Path) -> None:
        for step in (2, 4, 999999, 1000000):
            save(tmp_path, step, make_state(), {})
        assert [path.name for path in prune(tmp_path, 2)] == ["step-000002", "step-000004"]
        assert [path.name for path in prune(tmp_path, 1)] == ["step-999999"]
        assert [path.name for path in tmp_path.glob("step-*")] == ["step-1000000"]

    def test_a_damaged_one_does_not_count(self, tmp_path: Path) -> None:
        for step in (2, 4):
            save(tmp_path, step, make_state(), {})
        os.truncate(shard_of(tmp_path / "step-000004"), 10)
        assert prune(tmp_path, 1) == []
        assert newest_good(tmp_path, lambda _: None) == tmp_path / "step-000002"

    def test_nothing_is_deleted_before_there_are_enough(self, tmp_path: Path) -> None:
        save(tmp_path, 2, make_state(), {})
        assert prune(tmp_path, 2) == []


class TestAnotherModel:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        return save(tmp_path, 1, make_state(), {}).path

    def test_lacks_a_tensor(self, saved: Path) -> None:
        state = blank(make_state())
        state["model"]["head.weight"] = torch.zeros(8, 4)
        with pytest.raises(CheckpointError, match=r"lacks model\.head\.weight \(1 missing\)"):
            load(saved, state)

    def test_has_one_too_many(self, saved: Path) -> None:
        state = blank(make_state())
        del state["model"]["embed_tokens.weight"]
        with pytest.raises(CheckpointError, match=r"has model\.embed_tokens\.weight \(1 left over\)"):
            load(saved, state)

    @pytest.mark.parametrize("other", [torch.zeros(9, 4), torch.zeros(8, 4, dtype=torch.bfloat16)])
    def test_shape_or_dtype_differs(self, saved: Path, other: Tensor) -> None:
        state = blank(make_state())
        state["model"]["embed_tokens.weight"] = other
        with pytest.raises(CheckpointError, match=r"was saved as \[8, 4\] torch.float32; the model has"):
            load(saved, state)

    def test_a_section_alone_is_enough(self, saved: Path) -> None:
        model = blank(make_state())["model"]
        load(saved, {"model": model})
        assert equal(model, make_state()["model"])

    def test_not_a_saved_state(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="does not exist"):
            verify(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match="it is not a saved state"):
            load(tmp_path, {})


def test_updates_below_bf16_survive_because_masters_keep_their_dtype(tmp_path: Path) -> None:
    master = torch.tensor([1.0])
    for _ in range(50):
        master -= 6e-4
    save(tmp_path, 50, {"model": {"w": master}}, {})
    resumed = torch.zeros(1)
    load(tmp_path / "latest", {"model": {"w": resumed}})
    for _ in range(50):
        resumed -= 6e-4
    assert resumed.item() == pytest.approx(0.940002, abs=1e-6)
    assert resumed.bfloat16().item() == 0.94140625


def test_what_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="`loader` cannot be saved: set"):
        save(tmp_path, 1, {"loader": {1, 2}}, {})
    assert not list(tmp_path.iterdir())
