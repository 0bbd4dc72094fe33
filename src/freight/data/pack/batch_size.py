"""From documents per step to rows per step: a global batch may be counted in either."""

from __future__ import annotations

USUAL = (32, 64, 128, 256, 512)


def rows_for_documents(documents: int, packing_factor: float) -> int:
    """Rows that hold about so many documents: `max(1, round(documents / n))`, whatever the number of ranks.

    Args:
        documents: Documents of an optimizer step.
        packing_factor: Documents per row, n.
    """
    return max(1, round(documents / packing_factor))


def batch_size_sentence(documents: int, packing_factor: float, num_rows: int, *, drop_last: bool = False) -> str:
    """The arithmetic of `rows_for_documents`, for people.

    Args:
        documents: Documents of an optimizer step.
        packing_factor: Documents per row, n.
        num_rows: Rows of an epoch.
        drop_last: Whether a short last step is left out.
    """
    exact = documents / packing_factor
    rows = rows_for_documents(documents, packing_factor)
    average = rows * packing_factor
    return (
        f"global batch {documents:,} documents / n {packing_factor:.2f} = {exact:,.1f} -> {_rows(rows)} = "
        f"{average:,.1f} documents on average ({average / documents - 1:+.1%}); {_steps(num_rows, rows, drop_last)}"
    )


def rows_sentence(rows: int, packing_factor: float, num_rows: int, *, drop_last: bool = False) -> str:
    """What a global batch that counts rows is in documents.

    Args:
        rows: Rows of an optimizer step.
        packing_factor: Documents per row, n.
        num_rows: Rows of an epoch.
        drop_last: Whether a short last step is left out.
    """
    return (
        f"global batch {_rows(rows)} x n {packing_factor:.2f} = {rows * packing_factor:,.1f} documents on average; "
        f"{_steps(num_rows, rows, drop_last)}"
    )


def examples_sentence(packing_factor: float) -> str:
    """Rows for some usual numbers of documents, to copy from.

    Args:
        packing_factor: Documents per row, n.
    """
    pairs = (f"{documents} documents = {_rows(rows_for_documents(documents, packing_factor))}" for documents in USUAL)
    return f"global batch in rows, n {packing_factor:.2f} documents each: {', '.join(pairs)}"


def _rows(rows: int) -> str:
    return f"{rows:,} row{'s' * (rows != 1)}"


def _steps(num_rows: int, rows: int, drop_last: bool) -> str:
    steps = num_rows // rows if drop_last else -(-num_rows // rows)
    return f"{steps:,} step{'s' * (steps != 1)} per epoch"
