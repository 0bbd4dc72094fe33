"""Which charts a report has, and the words around them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from freight.train.report_charts import Format, Series, Style, histogram, line_chart, share_bar, with_trend
from freight.train.report_scales import Point
from freight.train.run_folder import Run

LOG_SCALE_FROM = 30.0


@dataclass(frozen=True)
class Figure:
    """One chart with its words."""

    title: str
    picture: Markup
    value: str = ""
    note: str = ""
    legend: Sequence[tuple[str, int, str]] = ()
    wide: bool = False


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
    picture = line_chart(series, label="Loss over steps", form="{:.4f}".format, axis_form="{:.7g}".format, height=300)
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


def _legend(series: Sequence[Series]) -> list[tuple[str, int, str]]:
    return [(s.label, s.tone, s.style) for s in series]


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def _scientific(value: float) -> str:
    """`2e-05` rather than a row of zeros."""
    return f"{value:.3g}" if value == 0 or value >= 1e-2 else f"{value:.2e}".replace(".00e", "e").replace("0e", "e")


def _short(value: float) -> str:
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k" if value >= 1e4 else f"{value:,.0f}"
