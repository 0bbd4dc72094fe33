"""`report.html`: everything worth seeing of a run, in one file that opens from disk.

Reads only the run folder (config.yaml, environment.json, metrics.jsonl, data.json, status.json, plan.txt,
warnings.jsonl), any of which may be missing: a run that failed in its first second still gets a page. No script, no
font, no picture from elsewhere; colours follow the reader's light or dark setting, and paper gets the light ones.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from freight.train.console import duration, gibibytes
from freight.train.report_figures import data_figures, training_figures
from freight.train.run_folder import Run

REPORT_FILE = "report.html"
SHOWN_STEPS = 24


@dataclass(frozen=True)
class Tile:
    """One key number."""

    name: str
    value: str | Markup
    note: str = ""
    kind: str = ""


def write_report(run_dir: Path | str) -> Path:
    """Write `report.html` from what the run folder holds now; the old page stays until the new one is complete.

    Returns:
        Where the page lies.
    """
    run = Run.read(run_dir)
    path = run.folder / REPORT_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(render(run), encoding="utf-8")
    temporary.replace(path)
    return path


def render(run: Run) -> str:
    """The page of a run."""
    files = resources.files("freight.train")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files.joinpath("report.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        style=Markup(files.joinpath("report.css").read_text(encoding="utf-8")),
        name=run.folder.resolve().name,
        state=run.status.get("state", "running"),
        message=run.status.get("message", ""),
        facts=headline(run),
        tiles=tiles(run),
        training=training_figures(run),
        data=run.data,
        data_figures=data_figures(run.data),
        sources=sources(run),
        rejects=sorted(run.data.get("skipped", {}).items(), key=lambda item: -item[1]),
        skipped=listed(run.skipped_steps),
        warnings=run.warnings,
        plan=run.plan,
        config=highlighted_yaml(run.config),
        environment=flattened(run.environment),
    )


def headline(run: Run) -> list[str]:
    """The line under the title."""
    facts = []
    times = [record["time"] for record in run.metrics if "time" in record]
    if times:
        facts.append(time.strftime("%-d %B %Y, %H:%M", time.localtime(times[0])))
        facts.append(f"{duration(times[-1] - times[0])} so far" if _running(run) else duration(times[-1] - times[0]))
    gpus, cpu = run.environment.get("gpus"), run.environment.get("cpu")
    if gpus:
        facts.append(", ".join(str(gpu.get("name")) for gpu in gpus))
    elif cpu:
        facts.append(f"{cpu.get('name')}, {cpu.get('cores')} cores")
    if version := run.environment.get("freight"):
        facts.append(f"Freight {version}")
    return facts


def tiles(run: Run) -> list[Tile]:
    """The key numbers, most wanted first; what was not measured is left out."""
    found = [_loss_tile(run)]
    if rates := run.values("perf/tokens_per_second"):
        found.append(Tile("Real tokens/s", f"{statistics.median(rates):,.0f}", "median; padding not counted"))
    if steps := run.points("train/loss"):
        found.append(_steps_tile(run, int(steps[-1][0])))
    if run.data:
        note = f"{run.data['packing_factor']:.1f} documents per row of {run.data['pack_size']:,}"
        found.append(Tile("Packing efficiency", f"{run.data['efficiency']:.1%}", note))
    if peaks := run.values("memory/peak_bytes"):
        found.append(Tile("Peak memory", gibibytes(max(peaks)), "largest so far, whole process"))
    if mfu := run.values("perf/mfu"):
        found.append(Tile("MFU", f"{statistics.median(mfu):.0%}", "median; of the device's peak"))
    return [tile for tile in found if tile is not None]


def _loss_tile(run: Run) -> Tile | None:
    held_out, training = run.values("eval/loss"), run.values("train/loss")
    losses = held_out or training
    if not losses:
        return None
    kind = "main held-out" if held_out else "main"
    name, first, last = "Held-out loss" if held_out else "Training loss", losses[0], losses[-1]
    if len(losses) == 1:
        return Tile(name, f"{first:.3f}", f"perplexity {_perplexity(first)}", kind)
    value = Markup('<span class="was">{:.3f} →</span> {:.3f}').format(first, last)
    change = f"{abs(last - first) / first:.1%} {'lower' if last < first else 'higher'}" if first else ""
    return Tile(name, value, f"{change}; perplexity {_perplexity(first)} → {_perplexity(last)}", kind)


def _steps_tile(run: Run, last: int) -> Tile:
    total = run.status.get("total_steps")
    notes = []
    if epochs := run.values("train/epoch"):
        notes.append(f"{epochs[-1]:.2f} epochs")
    if tokens := run.values("train/tokens"):
        notes.append(f"{tokens[-1]:,.0f} tokens")
    value = (
        Markup('{:,} <span class="was">of {:,}</span>').format(last, total) if total and total != last else f"{last:,}"
    )
    return Tile("Steps", value, ", ".join(notes))


def sources(run: Run) -> list[tuple[str, str, str]]:
    """Held-out loss of each source, first and last; nothing for a single one, whose loss is the whole."""
    prefix = "eval/loss/"
    names = sorted({key for record in run.metrics for key in record if key.startswith(prefix)})
    series = [(name.removeprefix(prefix), run.values(name)) for name in names]
    rows = [(name, f"{values[0]:.4f}", f"{values[-1]:.4f}") for name, values in series if values]
    return rows if len(rows) > 1 else []


def listed(steps: Sequence[int]) -> str:
    """`3, 17, 18 and 40 more`."""
    shown = ", ".join(f"{step:,}" for step in steps[:SHOWN_STEPS])
    return shown + (f" and {len(steps) - SHOWN_STEPS:,} more" if len(steps) > SHOWN_STEPS else "")


def highlighted_yaml(text: str) -> Markup:
    """YAML with its keys marked."""
    lines = []
    for line in text.splitlines():
        match = re.match(r"^(\s*(?:- )?)([\w.\-/]+)(:)(.*)$", line)
        lines.append(f"{match[1]}<b>{escape(match[2])}</b>:{escape(match[4])}" if match else escape(line))
    return Markup("\n".join(lines))


def flattened(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings as dotted names."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows.extend(flattened(value, f"{name}."))
        elif isinstance(value, list):
            rows.append((name, ", ".join(str(item) for item in value) or "-"))
        else:
            rows.append((name, "-" if value is None else str(value)))
    return rows


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.2f}" if loss < 20 else f"e^{loss:.1f}"


def _running(run: Run) -> bool:
    return run.status.get("state", "running") == "running"
