"""From documents per step to rows per step: a global batch may be counted in either."""

from __future__ import annotations


def rows_for_documents(documents: int, packing_factor: float) -> int:
    """Rows that hold about so many documents: `max(1, round(documents / n))`, whatever the number of ranks.

    Args:
        documents: Documents of an optimizer step.
        packing_factor: Documents per row, n.
    """
    return max(1, round(documents / packing_factor))


def batch_size_sentence(documents: int, packing_factor: float, num_rows: int) -> str:
    """The arithmetic of `rows_for_documents`, for people.

    Args:
        documents: Documents of an optimizer step.
        packing_factor: Documents per row, n.
        num_rows: Rows of an epoch.
    """
    exact = documents / packing_factor
    rows = rows_for_documents(documents, packing_factor)
    average = rows * packing_factor
    steps = -(-num_rows // rows)
    return (
        f"global batch {documents} documents / n {packing_factor:.2f} = {exact:.1f} -> {rows} rows = {average:.1f} "
        f"documents on average ({average / documents - 1:+.1%}); {steps:,} steps per epoch"
    )
