"""The picture beside a packed file: document lengths, row fill, documents per row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from freight.data.pack.pack_report import PackReport
from freight.data.pack.packing import PackedRows

INK, QUIET, GRID = "#1f2933", "#6b7785", "#e4e8ec"
LENGTHS, FILL, DOCUMENTS = "#2b6cb0", "#2f9e7f", "#c77d2e"
BINS = 60


def draw(path: Path, report: PackReport, rows: PackedRows, lengths: np.ndarray) -> None:
    """Write the picture as PNG.

    Args:
        path: Where.
        report: Numbers for title and notes.
        rows: The plan.
        lengths: int `[documents]`.
    """
    figure = Figure(figsize=(12.6, 4.1), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    _document_lengths(left, report, lengths)
    _row_fill(middle, report, rows)
    _documents_per_row(right, report, rows)
    figure.suptitle(
        f"{report.documents:,} documents in {report.rows:,} rows of {report.pack_size:,} tokens",
        x=0.045,
        y=0.975,
        ha="left",
        fontsize=14,
        fontweight="bold",
        color=INK,
    )
    figure.text(
        0.045,
        0.855,
        f"{report.algorithm}, seed {report.seed}: {report.efficiency:.1%} of all tokens are real; "
        f"{report.speedup_over_padding:.1f}x fewer tokens than padding each document, "
        f"{report.speedup_over_longest:.1f}x fewer than padding to the longest of a batch",
        ha="left",
        fontsize=10,
        color=QUIET,
    )
    figure.subplots_adjust(left=0.06, right=0.985, top=0.74, bottom=0.115, wspace=0.26)
    figure.savefig(path, format="png")


def _document_lengths(axes: Axes, report: PackReport, lengths: np.ndarray) -> None:
    _style(axes, "Document lengths", "tokens", "documents, log scale")
    axes.hist(lengths, bins=BINS, color=LENGTHS, log=True)
    axes.set_ylim(bottom=0.7)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    longest = int(lengths.max())
    axes.set_xlim(0, longest * 1.02)
    for name, words, height in (("median", "median", 0.97), ("99%", "99% below", 0.89)):
        length = report.length_quantiles[name]
        axes.axvline(length, color=INK, linewidth=1, linestyle=(0, (3, 2)))
        axes.annotate(
            f"{words} {length:,}",
            (length, height),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0) if length < 0.6 * longest else (-4, 0),
            ha="left" if length < 0.6 * longest else "right",
            textcoords="offset points",
            fontsize=8.5,
            color=INK,
            va="top",
        )


def _row_fill(axes: Axes, report: PackReport, rows: PackedRows) -> None:
    _style(axes, "Row fill", "real tokens of a row", "rows, log scale")
    axes.hist(rows.tokens_of_rows / rows.pack_size, bins=np.linspace(0, 1, BINS + 1).tolist(), color=FILL, log=True)
    axes.set_ylim(bottom=0.7)
    axes.set_xlim(0, 1.005)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _note(axes, f"{report.efficiency:.1%} on average\n{report.fill:.1%} of the best possible")


def _documents_per_row(axes: Axes, report: PackReport, rows: PackedRows) -> None:
    _style(axes, "Documents per row", "documents in a row", "rows")
    counts = np.bincount(rows.documents_of_rows)
    axes.bar(np.arange(len(counts)), counts, width=0.86 if len(counts) < BINS else 1.0, color=DOCUMENTS)
    axes.set_xlim(0.4, len(counts) - 0.4)
    axes.set_ylim(0, counts.max() * 1.2)  # room for the note
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _note(axes, f"{report.packing_factor:.2f} on average\n{report.longest_row} at most", "right")


def _style(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel(x, fontsize=9, color=QUIET)
    axes.set_ylabel(y, fontsize=9, color=QUIET)
    axes.tick_params(colors=QUIET, labelsize=8.5, length=0)
    axes.tick_params(which="minor", length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _note(axes: Axes, text: str, side: str = "left") -> None:
    axes.text(
        0.04 if side == "left" else 0.97, 0.95, text, transform=axes.transAxes, ha=side, va="top", fontsize=9, color=INK
    )
