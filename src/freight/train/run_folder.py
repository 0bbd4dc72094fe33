"""Small files of a run folder beside metrics and checkpoints: how the run stands, its warnings, facts on its data.

    status.json     state, message, step; rewritten, so a report can say what happened even after a failure
    warnings.jsonl  one warning per line: step, time, message
    data.json       what the packed training data looks like (`data_facts.py`)
    plan.txt        the resolved plan in words, a line each

Every file is replaced at once or appended by a single write: a crash leaves the old one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from freight.train.metrics import read_metrics
from freight.train.report_scales import Point

State = Literal["running", "finished", "interrupted", "failed"]

STATUS_FILE = "status.json"
WARNINGS_FILE = "warnings.jsonl"
DATA_FILE = "data.json"
PLAN_FILE = "plan.txt"


@dataclass(frozen=True)
class RunStatus:
    """How a run stands.

    Args:
        state: `running`, `finished`, `interrupted` (saved, can be resumed) or `failed`.
        message: One line for the reader: how to resume, or what went wrong.
        step: Optimizer steps done.
        total_steps: Steps the run will have; None if not known.
    """

    state: State
    message: str = ""
    step: int = 0
    total_steps: int | None = None


def write_status(run_dir: Path | str, status: RunStatus) -> None:
    """Replace `status.json`."""
    write_json(Path(run_dir) / STATUS_FILE, {**asdict(status), "time": time.time()})


def add_warning(run_dir: Path | str, message: str, *, step: int = 0) -> None:
    """Append one warning."""
    line = json.dumps({"step": step, "time": time.time(), "message": message}, ensure_ascii=False)
    with (Path(run_dir) / WARNINGS_FILE).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def write_plan(run_dir: Path | str, lines: Sequence[str]) -> None:
    """Replace `plan.txt`."""
    (Path(run_dir) / PLAN_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file beside its place, then put it there."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


@dataclass
class Run:
    """What a run folder holds, as far as it is there."""

    folder: Path
    metrics: list[dict[str, float]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)
    config: str = ""

    @classmethod
    def read(cls, run_dir: Path | str) -> Run:
        """Read the folder."""
        folder = Path(run_dir)
        return cls(
            folder,
            metrics=read_metrics(folder),
            status=_json(folder / STATUS_FILE),
            data=_json(folder / DATA_FILE),
            environment=_json(folder / "environment.json"),
            warnings=[json.loads(line) for line in _text(folder / WARNINGS_FILE).splitlines() if line.endswith("}")],
            plan=[line for line in _text(folder / PLAN_FILE).splitlines() if line.strip()],
            config=_text(folder / "config.yaml"),
        )

    def points(self, key: str) -> list[Point]:
        """`(step, value)` of one metric; the later line wins where a step stands twice."""
        found = {float(record["step"]): float(record[key]) for record in self.metrics if key in record}
        return sorted(found.items())

    def values(self, key: str) -> list[float]:
        """Finite values of one metric."""
        return [value for _, value in self.points(key) if math.isfinite(value)]

    @property
    def skipped_steps(self) -> list[int]:
        """Steps that updated nothing, because their gradients were not finite."""
        return [int(step) for step, norm in self.points("train/grad_norm") if not math.isfinite(norm)]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _json(path: Path) -> dict[str, Any]:
    return json.loads(_text(path) or "{}")
