"""Charts as inline SVG, drawn from lists of numbers.

A chart is as wide as its place: positions along x are percentages, text and dots keep their size at any width, and only
the curves live in a stretched inner picture whose strokes do not scale. Colours are CSS classes (`tone-1`, ...), so one
picture serves light, dark and paper. Hover columns carry their numbers as `<title>`; nothing needs a script.

Long runs are thinned out by `downsample`, so the picture of 10,000 steps stays below 100 kB.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from markupsafe import Markup

from freight.train.report_scales import Point, Scale, downsample, range_of, smooth

Format = Callable[[float], str]
Style = Literal["line", "area", "faint", "dots"]

HOVER_COLUMNS = 120
SMOOTH_FROM = 40
CURVE_WIDTH = 1000


@dataclass(frozen=True)
class Series:
    """Points of one curve.

    Args:
        label: In the legend and in tooltips.
        points: `(x, y)` with x growing; a y that is not finite makes a gap.
        tone: Number of the colour.
        style: `line`, `area` (a line over a tint), `faint` (pale, for raw values under a smooth line), `dots`.
        hover: Whether tooltips name its values.
    """

    label: str
    points: Sequence[Point]
    tone: int = 1
    style: Style = "line"
    hover: bool = True


def with_trend(series: Series) -> list[Series]:
    """A noisy curve as a pale line and its moving mean; short ones as they are."""
    if len(series.points) < SMOOTH_FROM:
        return [series]
    window = max(5, len(series.points) // 25) | 1
    return [
        Series(series.label, series.points, series.tone, "faint"),
        Series(f"mean of {window} steps", smooth(series.points, window), series.tone, "line", hover=False),
    ]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    form: Format,
    axis_form: Format | None = None,
    x_name: str = "step",
    log: bool = False,
    zero: bool = False,
    height: int = 200,
) -> Markup:
    """Curves over steps.

    Args:
        series: At least one with a point; drawn in order.
        label: What the picture shows, for screen readers.
        form: How a tooltip writes a value.
        axis_form: How a tick writes a value; by default as a tooltip does.
        x_name: Name of x in tooltips and under the axis.
        log: Logarithmic y.
        zero: y begins at 0.
        height: Pixels of the plot.
    """
    xs = [x for s in series for x, _ in s.points]
    x_scale = Scale(min(xs), max(xs)) if max(xs) > min(xs) else Scale(xs[0] - 1, xs[0] + 1)
    y_scale = range_of([y for s in series for _, y in s.points], log=log, zero=zero)

    def y_of(value: float) -> float:
        return round((1 - y_scale(value)) * height, 2)

    parts = [_grid(y_scale.ticks(4), y_of, axis_form or form)]
    parts.append(_x_axis([(x_scale(v), f"{v:,.0f}") for v in _whole(x_scale.ticks(6), xs)], height, x_name))
    parts.extend(_curve(s, x_scale, y_of, height) for s in series)
    parts.extend(_missing(s, x_scale, height) for s in series if s.hover)
    parts.append(_hover(series, x_scale, y_of, height, form, x_name))
    return _svg("".join(parts), height, label)


def histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    *,
    label: str,
    x_name: str,
    y_name: str,
    markers: Sequence[tuple[float, str]] = (),
    log: bool = False,
    tone: int = 1,
    height: int = 200,
    x_form: Format = "{:,.0f}".format,
) -> Markup:
    """Bars over ranges, with marked values.

    Args:
        edges: `len(counts) + 1` growing values.
        counts: Of each range.
        label: What the picture shows, for screen readers.
        x_name: Under the axis.
        y_name: What is counted, in tooltips.
        markers: Values to mark, with a word each.
        log: Logarithmic y; a count of 1 still shows.
        tone: Number of the colour.
        height: Pixels of the plot.
        x_form: How an edge is written.
    """
    top = max([*counts, 1])
    y_scale = Scale(0.6, top * 1.6, log=True) if log else Scale(0.0, top * 1.1)
    x_scale = Scale(edges[0], edges[-1])

    def y_of(value: float) -> float:
        return round((1 - y_scale(value)) * height, 2)

    ticks = [t for t in y_scale.ticks(4) if t == int(t)]
    parts = [_grid(ticks, y_of, "{:,.0f}".format)]
    parts.append(_x_axis([(x_scale(v), x_form(v)) for v in x_scale.ticks(6)], height, x_name))
    total = sum(counts) or 1
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        left, width = 100 * x_scale(low), 100 * (x_scale(high) - x_scale(low))
        title = f"{x_form(low)} to {x_form(high)}: {count:,} {y_name} ({count / total:.1%})"
        y = y_of(count) if count else height
        parts.append(
            f'<g class="bar"><rect class="hit" x="{left:.3f}%" width="{width:.3f}%" y="0" height="{height}"/>'
            f'<rect class="tone-{tone} fill" x="{left + width * 0.06:.3f}%" width="{width * 0.88:.3f}%" y="{y}" '
            f'height="{round(height - y, 2)}" rx="1.5"/><title>{escape(title)}</title></g>'
        )
    parts.extend(_marker(x_scale(value), word, height) for value, word in markers)
    return _svg("".join(parts), height, label)


def share_bar(shares: Sequence[tuple[str, float, int]], *, label: str) -> Markup:
    """One bar cut into shares `(name, share of 1, tone)`."""
    parts, left = [], 0.0
    for name, share, tone in shares:
        parts.append(
            f'<rect class="tone-{tone} fill" x="{100 * left:.3f}%" width="{100 * share:.3f}%" y="0" height="18">'
            f"<title>{escape(name)}: {share:.1%}</title></rect>"
        )
        left += share
    return Markup(
        f'<svg class="share" role="img" aria-label="{escape(label)}" width="100%" height="18">{"".join(parts)}</svg>'
    )


def _svg(content: str, height: int, label: str) -> Markup:
    return Markup(f'<svg class="plot" role="img" aria-label="{escape(label)}" height="{height}">{content}</svg>')


def _whole(ticks: Sequence[float], xs: Sequence[float]) -> list[float]:
    """Steps are integers; a lone step is its own tick."""
    return [t for t in ticks if t == int(t)] if max(xs) > min(xs) else [xs[0]]


def _grid(ticks: Sequence[float], y_of: Callable[[float], float], form: Format) -> str:
    return "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{y_of(t)}" y2="{y_of(t)}"/>'
        f'<text class="tick" x="-8" y="{y_of(t)}" dy="0.32em" text-anchor="end">{escape(form(t))}</text>'
        for t in ticks
    )


def _x_axis(ticks: Sequence[tuple[float, str]], height: int, name: str) -> str:
    marks = "".join(
        f'<line class="axis" x1="{100 * x:.3f}%" x2="{100 * x:.3f}%" y1="{height}" y2="{height + 4}"/>'
        f'<text class="tick" x="{100 * x:.3f}%" y="{height + 17}" text-anchor="middle">{escape(word)}</text>'
        for x, word in ticks
    )
    return (
        f'<line class="axis" x1="0" x2="100%" y1="{height}" y2="{height}"/>{marks}'
        f'<text class="name" x="100%" y="{height + 32}" text-anchor="end">{escape(name)}</text>'
    )


def _curve(series: Series, x_scale: Scale, y_of: Callable[[float], float], height: int) -> str:
    finite = [(x, y) for x, y in series.points if math.isfinite(y)]
    alone = series.style == "dots" or len(finite) == 1
    drawn = "" if len(finite) < 2 else _path(series, x_scale, y_of, height)
    if not alone:
        return drawn
    dots = "".join(
        f'<circle class="tone-{series.tone} dot" cx="{100 * x_scale(x):.3f}%" cy="{y_of(y)}" r="4"/>' for x, y in finite
    )
    return drawn + dots


def _path(series: Series, x_scale: Scale, y_of: Callable[[float], float], height: int) -> str:
    runs: list[list[str]] = [[]]
    for x, y in downsample(series.points):
        if math.isfinite(y):
            runs[-1].append(f"{CURVE_WIDTH * x_scale(x):.1f} {y_of(y):.1f}")
        elif runs[-1]:
            runs.append([])
    lines = ["L".join(run) for run in runs if run]
    kind = "faint" if series.style == "faint" else "curve"
    paths = f'<path class="tone-{series.tone} {kind}" d="{"".join("M" + line for line in lines)}"/>'
    if series.style == "area":
        ends = [(run[0].partition(" ")[0], run[-1].partition(" ")[0]) for run in runs if run]
        shape = "".join(f"M{a} {height}L{line}L{b} {height}Z" for line, (a, b) in zip(lines, ends, strict=True))
        paths = f'<path class="tone-{series.tone} tint" d="{shape}"/>' + paths
    return (
        f'<svg width="100%" height="{height}" viewBox="0 0 {CURVE_WIDTH} {height}" preserveAspectRatio="none" '
        f'overflow="visible">{paths}</svg>'
    )


def _missing(series: Series, x_scale: Scale, height: int) -> str:
    """A mark on the axis where a value was not finite."""
    places = [x for x, y in downsample(series.points) if not math.isfinite(y)]
    marks = (f"{100 * x_scale(x):.2f}%" for x in places)
    return "".join(f'<line class="missing" x1="{x}" x2="{x}" y1="{height - 9}" y2="{height}"/>' for x in marks)


def _hover(
    series: Sequence[Series],
    x_scale: Scale,
    y_of: Callable[[float], float],
    height: int,
    form: Format,
    x_name: str,
) -> str:
    """Invisible columns, each naming the values that fall into it."""
    groups = _hover_groups(sorted({x for s in series if s.hover for x, _ in s.points}))
    borders = [0.0, *((x_scale(a[-1]) + x_scale(b[0])) / 2 for a, b in itertools.pairwise(groups)), 1.0]
    named = [(s, dict(s.points)) for s in series if s.hover]
    parts = []
    for group, left, right in zip(groups, borders, borders[1:], strict=False):
        middle = group[len(group) // 2]
        at = f"{100 * x_scale(middle):.2f}%"
        lines = [f"{x_name} {group[0]:,.0f}" + (f" to {group[-1]:,.0f}" if len(group) > 1 else "")]
        dots = ""
        for s, known in named:
            found = [known[x] for x in group if x in known]
            if found:
                lines.append(f"{s.label} {_span(found, form)}")
            if math.isfinite(known.get(middle, math.nan)):
                dots += f'<circle class="tone-{s.tone} mark" cx="{at}" cy="{y_of(known[middle])}" r="4"/>'
        parts.append(
            f'<g class="col"><rect class="hit" x="{100 * left:.2f}%" width="{100 * (right - left):.2f}%" y="0" '
            f'height="{height}"/><line class="cross" x1="{at}" x2="{at}" y1="0" y2="{height}"/>{dots}'
            f"<title>{escape(chr(10).join(lines))}</title></g>"
        )
    return "".join(parts)


def _hover_groups(places: Sequence[float]) -> list[Sequence[float]]:
    """Every place alone, or as many equal groups as there may be columns."""
    count = min(len(places), HOVER_COLUMNS)
    return [places[len(places) * i // count : len(places) * (i + 1) // count] for i in range(count)]


def _span(values: Sequence[float], form: Format) -> str:
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return "not finite"
    low, high = form(min(finite)), form(max(finite))
    return low if low == high else f"{low} to {high}"


def _marker(x: float, word: str, height: int) -> str:
    anchor, shift = ("start", 5) if x < 0.75 else ("end", -5)
    return (
        f'<line class="marker" x1="{100 * x:.3f}%" x2="{100 * x:.3f}%" y1="0" y2="{height}"/>'
        f'<text class="word" x="{100 * x:.3f}%" dx="{shift}" y="9" text-anchor="{anchor}">{escape(word)}</text>'
    )
