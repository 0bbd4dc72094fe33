"""`report.html`: everything worth seeing of a run, in one file that opens from disk.

Reads only the run folder (config.yaml, environment.json, metrics.jsonl, data.json, status.json, plan.txt,
warnings.jsonl), any of which may be missing: a run that failed in its first second still gets a page. No script, no
font, no picture from elsewhere; colours follow the reader's light or dark setting, and paper gets the light ones.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from freight.train.console import duration, gibibytes
from freight.train.metrics import read_metrics
from freight.train.report_charts import Format, Point, Series, Style, histogram, line_chart, share_bar, with_trend
from freight.train.run_folder import DATA_FILE, PLAN_FILE, STATUS_FILE, WARNINGS_FILE

REPORT_FILE = "report.html"
LOG_SCALE_FROM = 30.0
SHOWN_STEPS = 24


@dataclass(frozen=True)
class Tile:
    """One key number."""

    name: str
    value: str | Markup
    note: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Figure:
    """One chart with its words."""

    title: str
    picture: Markup
    value: str = ""
    note: str = ""
    legend: Sequence[tuple[str, int, str]] = ()
    wide: bool = False


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
    hardware = run.environment.get("device") or run.environment.get("cpu")
    if isinstance(hardware, str):
        facts.append(hardware)
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


def training_figures(run: Run) -> list[Figure]:
    """Charts over steps, those with something to draw; the last one fills the row that it would leave half empty."""
    found = [
        _loss_figure(run),
        _figure("Learning rate", run.points("train/lr"), _scientific, style="area"),
        _figure(
            "Gradient norm",
            run.points("train/grad_norm"),
            "{:.3g}".format,
            trend=True,
            zero=False,
            note="before clipping",
        ),
        _figure(
            "Throughput",
            run.points("perf/tokens_per_second"),
            "{:,.0f} tok/s".format,
            axis_form=_short,
            trend=True,
            note="real tokens, all ranks",
        ),
        _figure(
            "Model FLOPs utilisation", run.points("perf/mfu"), "{:.1%}".format, axis_form="{:.0%}".format, trend=True
        ),
        _memory_figure(run),
    ]
    figures = [figure for figure in found if figure is not None]
    if sum(not figure.wide for figure in figures) % 2:
        figures[-1] = replace(figures[-1], wide=True)
    return figures


def _loss_figure(run: Run) -> Figure | None:
    training, held_out = run.points("train/loss"), run.points("eval/loss")
    series = with_trend(Series("training", training)) if _finite(training) else []
    if _finite(held_out):
        series.append(Series("held-out", held_out, tone=2, style="dots"))
    if not series:
        return None
    picture = line_chart(series, label="Loss over steps", form="{:.4f}".format, axis_form="{:.4g}".format, height=300)
    last = f"{_finite(held_out)[-1][1]:.4f} held-out" if _finite(held_out) else f"{_finite(training)[-1][1]:.4f}"
    return Figure("Loss", picture, last, "nats per label token", _legend(series), wide=True)


def _memory_figure(run: Run) -> Figure | None:
    points = run.points("memory/peak_bytes")
    unit, name = (2**30, "GiB") if max((y for _, y in points), default=0) >= 2**30 else (2**20, "MiB")
    scaled = [(x, y / unit) for x, y in points]
    return _figure("Peak memory", scaled, f"{{:.2f}} {name}".format, axis_form=f"{{:g}} {name}".format, style="area")


def _figure(
    title: str,
    points: Sequence[Point],
    form: Format,
    *,
    axis_form: Format | None = None,
    style: Style = "line",
    trend: bool = False,
    zero: bool = True,
    note: str = "",
) -> Figure | None:
    finite = [y for _, y in _finite(points)]
    if not finite:
        return None
    series = [Series(title.lower(), points, style=style)]
    if trend:
        series = with_trend(series[0])
    log = not zero and min(finite) > 0 and max(finite) > LOG_SCALE_FROM * statistics.median(finite)
    picture = line_chart(series, label=f"{title} over steps", form=form, axis_form=axis_form, log=log, zero=zero)
    notes = ", ".join(part for part in (note, "log scale" if log else "") if part)
    return Figure(title, picture, form(finite[-1]), notes, _legend(series) if len(series) > 1 else ())


def data_figures(data: Mapping[str, Any]) -> list[Figure]:
    """Charts of the packed data."""
    found = []
    lengths, fill = data.get("length_histogram"), data.get("row_fill_histogram")
    if lengths and sum(lengths["counts"]):
        quantiles = data.get("length_quantiles", {})
        markers = [
            (quantiles[key], word)
            for key, word in (("median", "median"), ("p99", "99th percentile"))
            if key in quantiles
        ]
        picture = histogram(
            lengths["edges"],
            lengths["counts"],
            label="Document lengths",
            x_name="tokens of a document",
            y_name="documents",
            markers=markers,
            log=True,
            tone=3,
        )
        words = "log scale; mean {mean:,.0f}, median {median:,.0f}, longest {max:,.0f} tokens"
        note = words.format(**quantiles) if quantiles else "log scale"
        found.append(Figure("Document lengths", picture, f"{data['documents']:,} documents", note))
    if fill and sum(fill["counts"]):
        picture = histogram(
            fill["edges"],
            fill["counts"],
            label="Real tokens per row",
            x_name="real tokens of a row",
            y_name="rows",
            log=True,
            tone=4,
        )
        note = f"log scale; {data['fill']:.1%} of the fullest packing possible"
        found.append(Figure("Row fill", picture, f"{data['rows']:,} rows", note))
    if data.get("efficiency"):
        real, supervised = data["efficiency"], data["efficiency"] * data["supervised_share"]
        shares = [("learned from", supervised, 1), ("read as context", real - supervised, 5), ("padding", 1 - real, 6)]
        legend = [(f"{name} {share:.1%}", tone, "fill") for name, share, tone in shares]
        found.append(
            Figure(
                "Where the tokens go",
                share_bar(shares, label="Shares of all slots"),
                "",
                "of all slots of all rows",
                legend,
                True,
            )
        )
    return found


def sources(run: Run) -> list[tuple[str, str, str]]:
    """Held-out loss of each source, first and last."""
    prefix = "eval/loss/"
    names = sorted({key for record in run.metrics for key in record if key.startswith(prefix)})
    series = [(name.removeprefix(prefix), run.values(name)) for name in names]
    return [(name, f"{values[0]:.4f}", f"{values[-1]:.4f}") for name, values in series if values]


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


def _legend(series: Sequence[Series]) -> list[tuple[str, int, str]]:
    return [(s.label, s.tone, s.style) for s in series]


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.2f}" if loss < 20 else f"e^{loss:.1f}"


def _scientific(value: float) -> str:
    """`2e-05` rather than a row of zeros."""
    return f"{value:.3g}" if value == 0 or value >= 1e-2 else f"{value:.2e}".replace(".00e", "e").replace("0e", "e")


def _short(value: float) -> str:
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k" if value >= 1e4 else f"{value:,.0f}"


def _running(run: Run) -> bool:
    return run.status.get("state", "running") == "running"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _json(path: Path) -> dict[str, Any]:
    return json.loads(_text(path) or "{}")
