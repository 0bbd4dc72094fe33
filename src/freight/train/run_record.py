"""What a run tells people while it goes: lines, metrics, warnings, status, report.

The first rank tells; the others are mute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from freight.config.schema import Config
from freight.train.metrics import MetricLog, read_metrics
from freight.train.report import write_report
from freight.train.run_folder import RunStatus, State, add_warning, write_status

REPORT_EVERY_SECONDS = 60.0

Say = Callable[[str], None]


class RunRecord:
    """The run folder and the console, as the loop writes to them.

    Args:
        run_dir: The run folder.
        say: Gets every line for the user.
        total_steps: Of the run.
        mute: This rank writes and says nothing.
    """

    def __init__(self, run_dir: Path, say: Say, total_steps: int, *, mute: bool = False) -> None:
        self.run_dir, self.mute = run_dir, mute
        self._say, self._total_steps = say, total_steps
        self._log: MetricLog | None = None
        self._reported = time.monotonic()

    def open(self, config: Config, resumed_step: int | None) -> None:
        """Begin to take metrics.

        Args:
            config: Of the run.
            resumed_step: Step that the run goes on from; later lines are dropped. None = all are.
        """
        if not self.mute:
            log = config.log
            self._log = MetricLog(
                self.run_dir,
                tensorboard=log.tensorboard,
                wandb=log.wandb,
                config=config.model_dump(mode="json"),
                resumed_step=resumed_step,
            )

    def say(self, line: str) -> None:
        """A line for the user."""
        if not self.mute:
            self._say(line)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step."""
        if self._log is not None:
            self._log.write(step, values)

    def warn(self, message: str, step: int = 0) -> None:
        """A warning, for the user and for the report."""
        if not self.mute:
            add_warning(self.run_dir, message, step=step)
            self.say(f"warning: {message}")

    def status(self, state: State, step: int, message: str = "") -> None:
        """How the run stands."""
        if not self.mute:
            write_status(self.run_dir, RunStatus(state, message, step, self._total_steps))

    def report(self) -> None:
        """Draw the report."""
        if not self.mute:
            write_report(self.run_dir)

    def report_now_and_then(self, step: int) -> None:
        """Status and report, at most once a minute."""
        if time.monotonic() - self._reported >= REPORT_EVERY_SECONDS:
            self.status("running", step)
            self.report()
            self._reported = time.monotonic()

    def evaluated(self, step: int) -> bool:
        """Whether an evaluation of this step stands in the metrics."""
        return any(line["step"] == step and "eval/loss" in line for line in read_metrics(self.run_dir))

    def close(self) -> None:
        """Flush the metrics."""
        if self._log is not None:
            self._log.close()
