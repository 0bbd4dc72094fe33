"""Where numbers of a run go: `metrics.jsonl` first, TensorBoard and Weights & Biases beside it.

`metrics.jsonl` is the truth that the report and everybody's scripts read: one JSON object per line, appended with a
single write, so a crash can tear the last line only, and reading passes over a torn one. A line is
`{"step": n, "time": unix seconds, "train/loss": ...}`; an evaluation is a line of its own at the same step. A number
that is not finite stands as `NaN` or `Infinity`, as Python's json writes and reads it.

Step n is the state after n optimizer steps: 0 is before the first. A resumed run drops what lies beyond its checkpoint,
so the file never shows a step twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from freight.errors import ConfigError

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb/freight-run-id.txt"


class MetricSink(Protocol):
    """Something that takes the numbers of a step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class MetricLog:
    """Writes every step's numbers to all sinks.

    Args:
        run_dir: The run folder; made if missing.
        tensorboard: Also write TensorBoard events, into `run_dir/tensorboard`.
        wandb: Arguments of `wandb.init` (`project`, ...), or None.
        config: What wandb shows as the run's configuration.
        resumed_step: Step of the checkpoint the run continues from; later lines are dropped. None = a new run, which
            drops all lines.

    Raises:
        ConfigError: wandb is asked for and not installed, or refuses its arguments.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        tensorboard: bool = True,
        wandb: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        resumed_step: int | None = None,
    ) -> None:
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        drop_lines_after(path, -1 if resumed_step is None else resumed_step)
        self._file = path.open("a", encoding="utf-8")
        self._sinks: list[MetricSink] = []
        if tensorboard:
            self._sinks.append(TensorBoardSink(folder / "tensorboard", resumed_step))
        if wandb is not None:
            self._sinks.append(WandbSink(folder, wandb, config or {}, resumed=resumed_step is not None))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line.

        Args:
            step: Optimizer steps done.
            values: Numbers by name, such as `train/loss`; Python numbers, not tensors.
        """
        line = json.dumps({"step": step, "time": round(time.time(), 3), **values})
        self._file.write(line + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        """Flush everything."""
        self._file.close()
        for sink in self._sinks:
            sink.close()


class TensorBoardSink:
    """Scalars as TensorBoard events; written by TensorBoard's own thread."""

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - half a second, only when used

        purge = None if resumed_step is None else resumed_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run, which a resumed run of ours continues."""

    def __init__(
        self, folder: Path, options: Mapping[str, Any], config: Mapping[str, Any], *, resumed: bool = False
    ) -> None:
        try:
            import wandb  # noqa: PLC0415 # pyright: ignore[reportMissingImports] - an optional extra
        except ImportError:
            raise ConfigError(
                "`log.wandb` is set but the package wandb is not installed. "
                "Run `pip install 'freight[wandb]'`, or set log.wandb=null."
            ) from None
        remembered = folder / WANDB_ID_FILE
        given = dict(options)
        if resumed and remembered.exists() and "id" not in given:
            given["id"] = remembered.read_text(encoding="utf-8").strip()
        if "id" in given:
            given["resume"] = "allow"
        try:
            self._run = wandb.init(dir=str(folder), config=dict(config), **given)
        except Exception as error:  # its own errors share no base with anything, and all of them are the options'
            words = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(
                f"`log.wandb`: wandb.init refuses: {words}. Change its arguments, or set log.wandb=null."
            ) from None
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def read_metrics(run_dir: Path | str) -> list[dict[str, float]]:
    """All lines of a run, oldest first; none if nothing was written yet. Torn lines are passed over."""
    path = Path(run_dir) / METRICS_FILE
    return [record for _, record in _records(path)] if path.exists() else []


def drop_lines_after(path: Path, step: int) -> None:
    """Keep only whole lines up to a step. The file is replaced at once, so a crash here loses nothing."""
    if not path.exists():
        return
    kept = "".join(line for line, record in _records(path) if record["step"] <= step)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(kept, encoding="utf-8")
    temporary.replace(path)


def _records(path: Path) -> Iterator[tuple[str, dict[str, float]]]:
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield line, record
