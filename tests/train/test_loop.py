"""The loop: equal runs are bit-equal, a stopped and resumed run equals a straight one, and every ending is told."""

from __future__ import annotations

import gc
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from freight.config.schema import Config
from freight.train import loop
from freight.train.loop import RunFailed
from freight.train.metrics import read_metrics
from freight.train.step import StepResult, train_step
from tests.train.tiny_run import TinyRun, config, no_peak, same

STEPS = 15
BASE = {
    "epochs": 3,
    "global_batch_size": 2,
    "optimizer": {"lr": 1e-2},
    "schedule": {"warmup_steps": 3},
    "precision": "fp32",
}
TWO_AND_ANOTHER = {"a": BASE, "b": BASE, "c": BASE | {"seed": 1}}


@pytest.fixture(autouse=True)
def _world(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    no_peak(monkeypatch)


def interrupt_at(step: int, number: int = signal.SIGINT):
    return lambda done: os.kill(os.getpid(), number) if done == step else None


def test_equal_runs_are_bit_equal_and_another_seed_is_not(tmp_path: Path) -> None:
    runs = [TinyRun(config(tmp_path / name, train=keys)) for name, keys in TWO_AND_ANOTHER.items()]
    results = [run.run() for run in runs]
    assert [result.steps for result in results] == [STEPS] * 3
    assert runs[0].values("train/loss") == runs[1].values("train/loss")
    assert same(runs[0].tensors(), runs[1].tensors())
    assert runs[0].values("train/loss") != runs[2].values("train/loss")
    losses = runs[0].values("train/loss")
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


DATA = {"train": "-", "tokenizer": "-", "sequence_length": 16, "num_workers": 0}
WAYS = {
    "no worker": {},
    "two microbatches, bf16, two workers": {
        "train": BASE | {"global_batch_size": 4, "micro_batch_tokens": 32, "precision": "bf16"},
        "data": DATA | {"num_workers": 2},
        "checkpoint": {"async": False},
    },
    "packed": {
        "train": BASE | {"global_batch_size": 1},
        "data": DATA | {"packing": {"pack_size": 32, "algorithm": "first_fit_shuffle"}},
    },
}


@pytest.mark.parametrize("stop", [3, 5, 7])
@pytest.mark.parametrize("way", list(WAYS))
def test_a_run_stopped_anywhere_and_resumed_equals_a_straight_one(stop: int, way: str, tmp_path: Path) -> None:
    def settings(name: str) -> Config:
        return config(tmp_path / name, **WAYS[way])

    straight = TinyRun(settings("straight"))
    straight.run()
    first = TinyRun(settings("stopped"), on_step=interrupt_at(stop))
    result = first.run()
    assert (result.exit_code, result.steps) == (130, stop)
    second = TinyRun(settings("stopped"), checkpoint=tmp_path / "stopped/checkpoints/latest")
    assert second.run().exit_code == 0
    joined = first.values("train/loss") + second.values("train/loss")
    assert joined == straight.values("train/loss")
    assert first.values("train/lr") + second.values("train/lr") == straight.values("train/lr")
    assert same(second.tensors(), straight.tensors())
    steps = [line["step"] for line in read_metrics(tmp_path / "stopped")]
    assert steps == list(range(1, len(joined) + 1))


def test_a_signal_between_microbatches_lets_the_step_finish(tmp_path: Path) -> None:
    keys = BASE | {"global_batch_size": 4, "micro_batch_tokens": 16}
    straight = TinyRun(config(tmp_path / "straight", train=keys))
    straight.run()
    stopped = TinyRun(config(tmp_path / "stopped", train=keys))
    forwards = 0

    def interrupt_in_the_second_of_four_microbatches(*_: object) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    handle = stopped.trainable.model.register_forward_pre_hook(interrupt_in_the_second_of_four_microbatches)
    assert stopped.run().steps == 2
    handle.remove()
    resumed = TinyRun(config(tmp_path / "stopped", train=keys), checkpoint=tmp_path / "stopped/checkpoints/latest")
    resumed.run()
    assert stopped.values("train/loss") + resumed.values("train/loss") == straight.values("train/loss")
    assert same(resumed.tensors(), straight.tensors())


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 0)], ids=lambda v: str(int(v))
)
def test_every_signal_saves_and_says_how_to_go_on(number: int, code: int, tmp_path: Path) -> None:
    run = TinyRun(config(tmp_path), on_step=interrupt_at(2, number))
    result = run.run()
    assert (result.exit_code, result.steps) == (code, 2)
    name = signal.Signals(number).name
    assert run.lines[-1] == (
        f"stopped by {name} after step 2 of 15, saved; continue with: freight train {tmp_path}/config.yaml "
        "--resume auto"
    )
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"], status["message"]) == ("interrupted", 2, run.lines[-1])
    assert (tmp_path / "checkpoints/step-000002/COMPLETE").exists()
    assert (tmp_path / "report.html").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_signal_exits_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exited(BaseException):
        pass

    def exit_now(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", exit_now)
    run = TinyRun(config(tmp_path))
    run.trainable.model.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Exited, match="130"):
        run.run()


def test_skipped_steps_do_not_advance_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = TinyRun(config(tmp_path / "straight"))
    straight.run()
    calls = 0

    def skip_two(*args: object, **keys: object) -> StepResult:
        nonlocal calls
        calls += 1
        if calls in (2, 3):
            return StepResult(float("nan"), float("nan"), 8, updated=False)
        return train_step(*args, **keys)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "train_step", skip_two)
    run = TinyRun(config(tmp_path / "skipped"))
    assert run.run().steps == STEPS
    rates = straight.values("train/lr")
    assert run.values("train/lr") == [rates[0], rates[1], rates[1], *rates[1:13]]
    assert len([line for line in run.lines if "nothing was updated" in line]) == 2


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = StepResult(float("nan"), float("nan"), 8, updated=False)
    monkeypatch.setattr(loop, "train_step", lambda *_, **__: skipped)
    run = TinyRun(config(tmp_path, train=BASE | {"max_nonfinite_steps": 4}))
    with pytest.raises(RunFailed, match="not finite in 4 steps in a row, the last one 4"):
        run.run()


def test_steps_without_labels_are_not_counted_as_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "train_step", lambda *_, **__: StepResult(float("nan"), float("nan"), 0, updated=False))
    run = TinyRun(config(tmp_path))
    assert run.run().steps == STEPS
    assert "warning: step 1: the global batch has no label; nothing was updated" in run.lines


def test_evaluation_stands_at_the_start_every_few_steps_and_the_end_and_disturbs_nothing(tmp_path: Path) -> None:
    data = {"train": "-", "validation": "-", "tokenizer": "-", "sequence_length": 16, "num_workers": 0}
    for precision in ("fp32", "bf16"):
        keys = BASE | {"precision": precision}
        plain = TinyRun(config(tmp_path / f"plain-{precision}", train=keys))
        plain.run()
        run = TinyRun(config(tmp_path / precision, data=data, train=keys | {"evaluate_every_steps": 4}))
        result = run.run()
        lines = {line["step"]: line["eval/loss"] for line in read_metrics(tmp_path / precision) if "eval/loss" in line}
        assert list(lines) == [0, 4, 8, 12, 15]
        assert result.evaluation is not None
        assert result.evaluation.loss == lines[15] != lines[0]
        assert run.values("train/loss") == plain.values("train/loss")
        assert same(run.tensors(), plain.tensors())


@pytest.mark.parametrize("stop", [4, 5], ids=["before it", "at it"])
def test_an_evaluation_is_made_once_though_a_signal_came_first(stop: int, tmp_path: Path) -> None:
    keys = config(tmp_path / "run", train=BASE | {"evaluate_every_steps": 5}, data=DATA | {"validation": "-"})
    TinyRun(keys, on_step=interrupt_at(stop)).run()
    TinyRun(keys, checkpoint=tmp_path / "run" / "checkpoints" / f"step-{stop:06d}").run()
    resumed = TinyRun(keys, checkpoint=tmp_path / "run" / "checkpoints" / "step-000015")
    resumed.run()
    assert [line["step"] for line in read_metrics(tmp_path / "run") if "eval/loss" in line] == [0, 5, 10, 15]


def test_without_an_interval_evaluation_comes_at_the_end(tmp_path: Path) -> None:
    data = {"train": "-", "validation": "-", "tokenizer": "-", "sequence_length": 16}
    TinyRun(config(tmp_path, data=data)).run()
    assert [line["step"] for line in read_metrics(tmp_path) if "eval/loss" in line] == [15]


def test_checkpoints_come_at_their_interval_and_the_newest_stay(tmp_path: Path) -> None:
    TinyRun(config(tmp_path, checkpoint={"every_steps": 4, "keep": 2})).run()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest",
        "step-000012",
        "step-000015",
    ]
    TinyRun(config(tmp_path / "none", checkpoint={"save_final": False})).run()
    assert not (tmp_path / "none/checkpoints").exists()


def test_metrics_have_the_names_people_know(tmp_path: Path) -> None:
    run = TinyRun(config(tmp_path, log={"dir": str(tmp_path), "tensorboard": False, "every_steps": 4}))
    run.run()
    assert list(run.metrics) == [4, 8, 12, 15]
    assert {
        "train/loss", "train/grad_norm", "train/lr", "train/epoch", "train/tokens", "perf/tokens_per_second",
        "perf/tokens_per_second_per_device", "perf/step_seconds", "perf/data_seconds", "memory/peak_bytes",
        "data/efficiency",
    } <= run.metrics[4].keys()  # fmt: skip
    assert run.metrics[15]["train/epoch"] == 3.0
    assert run.metrics[15]["train/tokens"] == 3 * int(run.loop._prepared.rows.num_tokens)


def test_memory_is_flat_after_the_second_step(tmp_path: Path) -> None:
    live: dict[int, int] = {}

    def count(step: int) -> None:
        if step not in (2, 3, 9, 14):
            return
        gc.collect()
        storages = {}
        for item in gc.get_objects():
            if isinstance(item, torch.Tensor) and type(item) in (torch.Tensor, torch.nn.Parameter):
                storage = item.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        live[step] = sum(storages.values())

    TinyRun(config(tmp_path, train=BASE | {"precision": "bf16"}), on_step=count).run()
    assert max(live[step] for step in (3, 9, 14)) <= live[2]


def test_a_profile_of_the_wanted_steps_is_written(tmp_path: Path) -> None:
    log = {"dir": str(tmp_path), "tensorboard": False, "profile": {"start_step": 2, "steps": 1}}
    TinyRun(config(tmp_path, log=log)).run()
    assert (tmp_path / "profile/trace.json.gz").stat().st_size > 1000


def test_a_profile_counts_the_steps_of_the_whole_run(tmp_path: Path) -> None:
    keys = config(tmp_path / "run", log={"dir": str(tmp_path / "run"), "profile": {"start_step": 2, "steps": 1}})
    TinyRun(keys, on_step=interrupt_at(3)).run()
    trace = tmp_path / "run" / "profile" / "trace.json.gz"
    trace.unlink()
    TinyRun(keys, checkpoint=tmp_path / "run" / "checkpoints" / "step-000003").run()
    assert not trace.exists()  # that step was before the resume


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"micro_batch_tokens": 32}}, "Lower train.micro_batch_tokens"),
        ({}, "Set recompute.granularity to full, or fpdt"),
        ({"recompute": {"granularity": "full"}}, "Set fpdt instead of recompute"),
        ({"fpdt": {"chunk_tokens": 8}}, r"Lower fpdt.chunk_tokens \(now 8\)"),
    ],
)
def test_out_of_memory_tells_the_peak_and_what_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], words: str
) -> None:
    def full(*_: object, **__: object) -> StepResult:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(loop, "train_step", full)
    with pytest.raises(RunFailed, match=r"out of memory in step 1, peak .*iB: .*9 GiB.*" + words):
        TinyRun(config(tmp_path, **sections)).run()


def test_the_schedule_ends_with_the_run_after_a_resume(tmp_path: Path) -> None:
    run = TinyRun(config(tmp_path), on_step=interrupt_at(5))
    run.run()
    resumed = TinyRun(config(tmp_path), checkpoint=tmp_path / "checkpoints/latest")
    resumed.run()
    assert replace(resumed.loop._counters) == loop.Counters(15, 15, 0, resumed.loop._counters.tokens)
