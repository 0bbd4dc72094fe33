"""What packing achieved, as a table, as JSON and as one sentence of advice. The picture is in `pack_picture.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from freight.data.pack.packing import PackedRows, pack

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
GOOD_EFFICIENCY = 0.95
WORTH_SWITCHING = 0.02


@dataclass(frozen=True)
class PackReport:
    """Numbers of one packing; lengths in tokens.

    Args:
        pack_size: Tokens of a row.
        algorithm: What packed.
        seed: With which seed.
        documents: Documents packed.
        rows: Rows made.
        packing_factor: Documents per row, n.
        efficiency: Real tokens over tokens of all rows.
        fill: Least possible number of rows over rows made.
        longest_row: Most spans in one row.
        seconds: Time of packing alone.
        tokens: Real tokens.
        pads: Tokens of rows that are padding.
        length_quantiles: Quantile -> document length.
        share_above_half: Share of documents longer than half a row.
        attention_pairs: Sum of squares of span lengths: the work that isolation leaves.
        row_pairs: Rows times the square of the row: the work without isolation.
        speedup_over_padding: Tokens computed when each document is padded to `sequence_length`, over packed.
        speedup_over_longest: The same, padded to the expected longest of as many documents as share a row.
        skipped: Records left out, by reason.
        tokens_cut: Tokens lost to truncation, of documents that were kept.
        tokens_dropped: Tokens of documents that were left out for their length.
        advice: One sentence.
        output: The file, or empty.
        reused: The file was already there, with equal metadata.
        remarks: What was noticed while the records were read; equal for all packings of them.
    """

    pack_size: int
    algorithm: str
    seed: int
    documents: int
    rows: int
    packing_factor: float
    efficiency: float
    fill: float
    longest_row: int
    seconds: float
    tokens: int
    pads: int
    length_quantiles: dict[str, int]
    share_above_half: float
    attention_pairs: int
    row_pairs: int
    speedup_over_padding: float
    speedup_over_longest: float
    skipped: dict[str, int] = field(default_factory=dict)
    tokens_cut: int = 0
    tokens_dropped: int = 0
    advice: str = ""
    output: str = ""
    reused: bool = False
    remarks: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def sentences(self) -> list[str]:
        """The numbers that the table leaves out, in words."""
        quantiles = "  ".join(f"{name} {length:,}" for name, length in self.length_quantiles.items())
        cut = ", ".join(f"{reason} {count:,}" for reason, count in self.skipped.items() if count) or "nothing"
        return [
            f"document lengths: {quantiles}",
            f"{self.share_above_half:.1%} of documents are longer than half a row; {self.pads:,} pads",
            f"left out: {cut}; {self.tokens_cut:,} tokens cut, {self.tokens_dropped:,} dropped as too long",
            f"attention work: {self.attention_pairs / self.row_pairs:.1%} of full rows "
            f"({self.attention_pairs:.2e} of {self.row_pairs:.2e} pairs)",
            f"expected speed-up: {self.speedup_over_padding:.2f}x over padding to sequence_length, "
            f"{self.speedup_over_longest:.2f}x over padding to the longest of each microbatch",
        ]


def measure(
    rows: PackedRows,
    lengths: np.ndarray,
    *,
    sequence_length: int,
    seed: int,
    seconds: float,
    skipped: dict[str, int] | None = None,
    tokens_cut: int = 0,
    tokens_dropped: int = 0,
    advice: str = "",
) -> PackReport:
    """Numbers of one packing.

    Args:
        rows: The plan.
        lengths: int `[documents]`, what was packed.
        sequence_length: What a padding trainer would pad to, in tokens.
        seed: Seed of the plan.
        seconds: Time the packing took.
        skipped: Records left out, by reason.
        tokens_cut: Tokens lost to truncation.
        tokens_dropped: Tokens of documents too long to keep.
        advice: From `advise`.
    """
    spans = rows.lengths.astype(np.int64)
    slots = len(rows) * rows.pack_size
    per_row = max(1, round(len(lengths) / len(rows)))
    return PackReport(
        pack_size=rows.pack_size,
        algorithm=rows.algorithm,
        seed=seed,
        documents=len(lengths),
        rows=len(rows),
        packing_factor=len(lengths) / len(rows),
        efficiency=rows.efficiency,
        fill=rows.fill,
        longest_row=int(rows.documents_of_rows.max()),
        seconds=seconds,
        tokens=rows.num_tokens,
        pads=slots - rows.num_tokens,
        length_quantiles={
            _quantile_name(q): int(v) for q, v in zip(QUANTILES, np.quantile(lengths, QUANTILES), strict=True)
        },
        share_above_half=float(np.mean(lengths > rows.pack_size / 2)),
        attention_pairs=int(np.square(spans).sum()),
        row_pairs=slots * rows.pack_size,
        speedup_over_padding=len(lengths) * sequence_length / slots,
        speedup_over_longest=len(lengths) * expected_longest(lengths, per_row) / slots,
        skipped=skipped or {},
        tokens_cut=tokens_cut,
        tokens_dropped=tokens_dropped,
        advice=advice,
    )


def _quantile_name(quantile: float) -> str:
    return {0.0: "min", 0.5: "median", 1.0: "max"}.get(quantile, f"{quantile:.0%}")


def expected_longest(lengths: np.ndarray, count: int) -> float:
    """Expected longest of `count` documents drawn at random: `sum over x >= 0 of 1 - F(x)^count`, in tokens."""
    share_up_to = np.cumsum(np.bincount(lengths)) / len(lengths)
    return float(np.sum(1.0 - share_up_to**count))


HEADINGS = ("pack_size", "algorithm", "documents", "rows", "n", "efficiency", "fill", "longest row", "seconds")
LEFT_ALIGNED = 2  # of the headings; numbers stand to the right


def table(reports: Sequence[PackReport]) -> list[str]:
    """A heading and one line per packing, in columns that no terminal width cuts."""
    cells = [
        HEADINGS,
        *(
            (
                str(report.pack_size),
                report.algorithm,
                f"{report.documents:,}",
                f"{report.rows:,}",
                f"{report.packing_factor:.2f}",
                f"{report.efficiency:.1%}",
                f"{report.fill:.1%}",
                f"{report.longest_row} docs",
                f"{report.seconds:.2f}",
            )
            for report in reports
        ),
    ]
    return _aligned(cells)


def table_of_file(metadata: dict[str, Any]) -> list[str]:
    """The same for a packed file, from what it says about itself."""
    line = (
        str(metadata["pack_size"]),
        metadata["algorithm"],
        f"{metadata['num_documents']:,}",
        f"{metadata['num_rows']:,}",
        f"{metadata['packing_factor']:.2f}",
        f"{metadata['efficiency']:.1%}",
        f"{metadata['fill']:.1%}",
        f"{metadata['max_documents_per_row']} docs",
    )
    return _aligned([HEADINGS[: len(line)], line])


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < LEFT_ALIGNED else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]


def advise(lengths: np.ndarray, pack_size: int, seed: int, *, document_multiple: int = 1) -> str:
    """One sentence on which algorithm or pack size to use, by trying them.

    Args:
        lengths: int `[documents]`, none above `pack_size`.
        pack_size: Tokens of a row.
        seed: For the trial packings.
        document_multiple: Every span takes the next multiple of it.
    """

    def trial(algorithm: str, size: int) -> PackedRows:
        return pack(lengths, algorithm, size, seed, document_multiple=document_multiple)

    shuffle = trial("first_fit_shuffle", pack_size)
    if shuffle.efficiency >= GOOD_EFFICIENCY:
        return "use first_fit_shuffle: random rows, near-best fill"
    decreasing = trial("first_fit_decreasing", pack_size)
    if decreasing.efficiency - shuffle.efficiency >= WORTH_SWITCHING:
        return (
            f"fill is poor ({shuffle.efficiency:.1%}); first_fit_decreasing gives {decreasing.efficiency:.1%}. "
            "It groups documents of similar length; watch validation loss"
        )
    if shuffle.num_tokens < pack_size / (1 - GOOD_EFFICIENCY):
        return (
            f"use first_fit_shuffle: {len(lengths):,} documents make only {len(shuffle):,} rows, so the last one's "
            f"padding shows ({shuffle.efficiency:.1%} filled)"
        )
    larger = {size: trial("first_fit_shuffle", size).efficiency for size in (2 * pack_size, 4 * pack_size)}
    size = next(
        (size for size, reached in larger.items() if reached >= GOOD_EFFICIENCY), max(larger, key=larger.__getitem__)
    )
    above_half = np.mean(lengths > pack_size / 2)
    return (
        f"fill is poor ({shuffle.efficiency:.1%}): {above_half:.0%} of documents are longer than half of pack_size; "
        f"pack_size {size} gives {larger[size]:.1%}"
    )
