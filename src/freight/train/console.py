"""What a user sees while something runs: a bar on a terminal, plain lines everywhere else.

`Progress` is for any long function that reports `(done, total, what)`; `TrainingDisplay` is for the training loop. Both
write to stderr, so that a command's own output can be piped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SHOW_AFTER_SECONDS = 2.0
LINE_EVERY_SECONDS = 10.0


def step_line(step: int, total: int | None, metrics: Mapping[str, float], eta_seconds: float | None = None) -> str:
    """One training step in one line; what was not measured is left out.

    Example:
        `step 10/200  loss 2.31  grad 0.90  lr 2.0e-05  412 tok/s  mfu 41%  mem 3.2 GiB  eta 4:10`
    """
    parts = [f"step {step}/{total}" if total else f"step {step}"]
    for key, form in _FORMS.items():
        if key in metrics:
            parts.append(form(metrics[key]))
    if eta_seconds is not None:
        parts.append(f"eta {duration(eta_seconds)}")
    return "  ".join(parts)


def evaluation_line(step: int, total: int | None, loss: float, tokens: int) -> str:
    """One evaluation in one line: `step 50/200  held-out loss 1.234  perplexity 3.43  (12,345 tokens)`."""
    place = f"step {step}/{total}" if total else f"step {step}"
    perplexity = math.exp(min(loss, 700.0))
    return f"{place}  held-out loss {loss:.4f}  perplexity {perplexity:.2f}  ({tokens:,} tokens)"


def duration(seconds: float) -> str:
    """`4:10`, `1:02:03`, `2d 3:04:05`; rounded up to a second, never below 0."""
    if not math.isfinite(seconds):
        return "-"
    total = max(0, math.ceil(seconds))
    days, rest = divmod(total, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    clock = f"{hours}:{minutes:02d}:{secs:02d}" if hours or days else f"{minutes}:{secs:02d}"
    return f"{days}d {clock}" if days else clock


def gibibytes(count: float) -> str:
    """`3.2 GiB`; `312 MiB` below one GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


_FORMS: dict[str, Callable[[float], str]] = {
    "train/loss": lambda v: f"loss {v:.2f}",
    "train/grad_norm": lambda v: f"grad {v:.2f}",
    "train/lr": lambda v: f"lr {v:.1e}",
    "perf/tokens_per_second": lambda v: f"{v:,.0f} tok/s",
    "perf/mfu": lambda v: f"mfu {v:.0%}",
    "memory/peak_bytes": lambda v: f"mem {gibibytes(v)}",
}


class Progress:
    """A callback `(done, total, what)` that draws, for functions of any length.

    Nothing is shown for the first two seconds of a stage. Then a bar on a terminal; elsewhere a line every ten seconds.
    A stage ends when all is done, or when `what` changes up to a colon: words behind it are shown and may change at
    every call. Use as a context manager, so that errors clear the bar.

    Args:
        console: Where to draw; stderr by default.
        clock: Seconds that only grow.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._what: str | None = None
        self._began = 0.0
        self._spoke = 0.0
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, done: int, total: int, what: str) -> None:
        """Report that `done` of `total` are finished; `total` 0 if it is not known."""
        now = self._clock()
        if stage_of(what) != self._what:
            self._next_stage(stage_of(what), now)
        if total and done >= total:
            self.close()
            return
        if now - self._began < SHOW_AFTER_SECONDS:
            return
        if self._console.is_terminal:
            self._draw(done, total, what)
        elif now - self._spoke >= LINE_EVERY_SECONDS:
            self._spoke = now
            self._console.print(self._line(done, total, what, now), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = self._what = None

    def _next_stage(self, what: str, now: float) -> None:
        self.close()
        self._what, self._began, self._spoke = what, now, now

    def _draw(self, done: int, total: int, what: str) -> None:
        if self._bar is None:
            self._bar = RichProgress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
                expand=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(what, total=total or None)
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total or None, description=what)

    def _line(self, done: int, total: int, what: str, now: float) -> str:
        stage, _, words = what.partition(": ")
        words = f"  {words}" if words else ""
        if not total:
            return f"{stage}: {done:,}{words}" if done else what
        eta = (now - self._began) * (total - done) / done if done else math.nan
        return f"{stage}: {done:,} of {total:,} ({done / total:.0%}){words}  eta {duration(eta)}"


def stage_of(what: str) -> str:
    """What is going on, without the words that change."""
    return what.partition(": ")[0]


class TrainingDisplay:
    """The training loop's display: a live bar with the step's numbers on a terminal, a line per step elsewhere.

    Args:
        console: Where to draw; stderr by default.
        clock: Seconds that only grow.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(self._console, clock)
        self._bar: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> TrainingDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def step(
        self, step: int, total: int | None, metrics: Mapping[str, float], eta_seconds: float | None = None
    ) -> None:
        """Show a finished step."""
        line = step_line(step, total, metrics, eta_seconds)
        if not self._console.is_terminal:
            self.say(line)
            return
        if self._bar is None:
            self._progress.close()
            self._bar = RichProgress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                TimeElapsedColumn(),
                console=self._console,
                expand=True,
            )
            self._bar.start()
        self._show(self._bar, "step", step, total, line)

    def progress(self, done: int, total: int, what: str) -> None:
        """Report on anything beside the steps, such as an evaluation: a second bar while the first one stands."""
        if self._bar is None:
            self._progress(done, total, what)
        elif total and done >= total:
            if stage_of(what) in self._tasks:
                self._bar.remove_task(self._tasks.pop(stage_of(what)))
        else:
            self._show(self._bar, stage_of(what), done, total or None, what)

    def close(self) -> None:
        """Leave the last line standing."""
        self._progress.close()
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
        self._tasks.clear()

    def _show(self, bar: RichProgress, name: str, done: int, total: int | None, text: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = bar.add_task(text, total=total)
        bar.update(self._tasks[name], completed=done, total=total, description=text, refresh=True)
