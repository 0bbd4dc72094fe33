"""Curves keep their extremes, ticks are round and inside, pictures are well-formed."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.train.report_charts import HOVER_COLUMNS, Series, histogram, line_chart, share_bar, with_trend
from freight.train.report_scales import Scale, downsample, linear_ticks, log_ticks, range_of, smooth

VALUES = st.floats(-1e6, 1e6) | st.just(math.nan)


@given(st.lists(VALUES, max_size=300), st.integers(1, 20))
@settings(max_examples=60)
def test_downsampling_keeps_extremes_order_and_gaps(values: list[float], columns: int) -> None:
    points = [(float(i), v) for i, v in enumerate(values)]
    kept = downsample(points, columns)
    assert len(kept) <= max(3 * columns, 0)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    finite = [v for v in values if math.isfinite(v)]
    found = [v for _, v in kept if math.isfinite(v)]
    assert bool(finite) == bool(found)
    if finite:
        assert (min(found), max(found)) == (min(finite), max(finite))
    assert any(math.isnan(v) for v in values) == any(math.isnan(v) for _, v in kept)


def test_ten_thousand_points_and_one_spike() -> None:
    points = [(float(i), 1.0 + (i % 7) / 100) for i in range(10_000)]
    points[4321] = (4321.0, 9.0)
    assert (4321.0, 9.0) in downsample(points)
    picture = line_chart([Series("loss", points)], label="loss", form="{:.2f}".format)
    assert len(picture) < 100_000
    assert "loss 1.00 to 9.00" in picture


@given(st.floats(-1e5, 1e5), st.floats(1e-3, 1e5), st.integers(2, 8))
def test_linear_ticks_are_round_and_inside(low: float, width: float, count: int) -> None:
    ticks = linear_ticks(low, low + width, count)
    assert 1 <= len(ticks) <= 2 * count + 1
    assert all(low - 1e-6 * width <= t <= low + width * (1 + 1e-6) for t in ticks)
    for a, b in itertools.pairwise(ticks):
        step = b - a
        assert round(step / 10 ** math.floor(math.log10(step) + 1e-6), 3) in (1, 2, 5, 10)


def test_log_ticks() -> None:
    assert log_ticks(0.6, 1500, 4) == [1, 10, 100, 1000]
    assert log_ticks(1, 60, 4) == [1, 2, 5, 10, 20, 50]
    assert log_ticks(1e-8, 1e8, 4) == [1e-8, 1e-4, 1, 1e4, 1e8]


def test_scales() -> None:
    assert [Scale(0, 4)(v) for v in (0, 1, 4)] == [0, 0.25, 1]
    assert Scale(1, 100, log=True)(10) == pytest.approx(0.5)
    assert Scale(1, 100, log=True)(0) == 0
    assert range_of([5.0, math.nan]).low < 5 < range_of([5.0, math.nan]).high
    assert range_of([math.nan]).high > range_of([math.nan]).low
    assert range_of([0.0, 0.0], zero=True) == Scale(0.0, 1.0)


@given(st.lists(st.floats(-10, 10) | st.just(math.inf), max_size=60), st.sampled_from([3, 5, 9]))
@settings(max_examples=40)
def test_moving_mean_equals_the_plain_one(values: list[float], window: int) -> None:
    points = [(float(i), v) for i, v in enumerate(values)]
    finite = [p for p in points if math.isfinite(p[1])]
    half = window // 2
    for i, (x, mean) in enumerate(smooth(points, window)):
        part = [y for _, y in finite[max(0, i - half) : i + half + 1]]
        assert (x, mean) == (finite[i][0], pytest.approx(sum(part) / len(part), abs=1e-9))
    assert len(smooth(points, window)) == len(finite)


def test_short_curves_get_no_trend_and_long_ones_do() -> None:
    assert len(with_trend(Series("loss", [(0.0, 1.0)] * 39))) == 1
    raw, trend = with_trend(Series("loss", [(float(i), 1.0) for i in range(200)]))
    assert (raw.style, trend.style, trend.label, trend.hover) == ("faint", "line", "mean of 9 steps", False)


@given(st.lists(VALUES, min_size=1, max_size=200), st.sampled_from(["line", "area", "faint", "dots"]), st.booleans())
@settings(max_examples=40)
def test_line_charts_are_well_formed_and_inside_their_frame(values: list[float], style: str, log: bool) -> None:
    series = Series("a <b> & c", [(float(i), v) for i, v in enumerate(values)], style=style)  # type: ignore[arg-type]
    picture = str(line_chart([series], label='"<x>"', form="{:g}".format, log=log, height=100))
    root = ElementTree.fromstring(picture)
    assert root.get("aria-label") == '"<x>"'
    assert len(root.findall("g[@class='col']")) == min(len(values), HOVER_COLUMNS)
    assert "nan" not in picture.replace("not finite", "")
    for path in root.iter("path"):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+(?:e-?\d+)?", path.get("d", ""))]
        assert all(-0.2 <= y <= 100.2 for y in numbers[1::2])
        assert all(-0.2 <= x <= 1000.2 for x in numbers[::2])
    gaps = sum(not math.isfinite(v) for v in values)
    assert len(root.findall("line[@class='missing']")) == gaps


@pytest.mark.parametrize("log", [False, True])
def test_histograms_name_every_bar(log: bool) -> None:
    picture = histogram([0, 10, 20, 30], [5, 0, 1], label="lengths", x_name="tokens", y_name="documents", log=log)
    root = ElementTree.fromstring(str(picture))
    titles = [bar.findtext("title") for bar in root.findall("g[@class='bar']")]
    assert titles == ["0 to 10: 5 documents (83.3%)", "10 to 20: 0 documents (0.0%)", "20 to 30: 1 documents (16.7%)"]
    heights = [float(bar.findall("rect")[1].get("height", "")) for bar in root.findall("g[@class='bar']")]
    assert heights[0] > heights[2] > heights[1] == 0


def test_shares_fill_the_bar() -> None:
    root = ElementTree.fromstring(str(share_bar([("a", 0.25, 1), ("b", 0.75, 2)], label="shares")))
    assert [(r.get("x"), r.get("width")) for r in root.findall("rect")] == [
        ("0.000%", "25.000%"),
        ("25.000%", "75.000%"),
    ]
