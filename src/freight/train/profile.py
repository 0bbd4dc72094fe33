"""A torch.profiler trace of some steps, to be opened in Perfetto; on CUDA a memory snapshot beside it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from freight.config.schema import ProfileConfig


class StepProfiler:
    """Records `config.steps` steps from `config.start_step` on; does nothing without a config.

    Args:
        config: Which steps.
        run_dir: The trace goes to `profile/` in it.
        device: Where the model computes.
        step: Steps done before; steps of the whole run count, whatever was resumed.
    """

    def __init__(self, config: ProfileConfig | None, run_dir: Path, device: torch.device, step: int = 0) -> None:
        self._profile: profile | None = None
        if config is None or config.start_step < step:
            return
        self._folder = run_dir / "profile"
        self._cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        ahead = config.start_step - step
        warmup = min(1, ahead)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=ahead - warmup, warmup=warmup, active=config.steps, repeat=1),
            on_trace_ready=self._write,
        )

    def __enter__(self) -> StepProfiler:
        if self._profile is not None:
            if self._cuda:
                torch.cuda.memory._record_memory_history()
            self._profile.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._profile is not None:
            self._profile.stop()

    def step(self) -> None:
        """A step is done."""
        if self._profile is not None:
            self._profile.step()

    def _write(self, finished: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._folder / "trace.json.gz"))
        if self._cuda:
            torch.cuda.memory._dump_snapshot(str(self._folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
