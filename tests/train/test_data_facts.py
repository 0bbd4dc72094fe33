"""Facts on packed data, counted by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.data.documents import InMemoryDocuments, make_document
from freight.data.pack.document_rows import DocumentRows
from freight.train.data_facts import data_facts


def rows_of(lengths: list[int], pack_size: int, algorithm: str = "first_fit_decreasing") -> DocumentRows:
    """Documents whose second half is supervised."""
    documents = [make_document(range(n), [i >= n // 2 for i in range(n)]) for n in lengths]
    skipped = {"too_long": 2, "no_target": 0}
    return DocumentRows(InMemoryDocuments(documents, {"skipped": skipped}), algorithm, pack_size)


def test_counts_by_hand() -> None:
    facts = data_facts(rows_of([6, 4, 8, 2], 10))
    assert facts["length_quantiles"]["median"] == 5
    assert facts["length_histogram"] == {"edges": list(range(9)), "counts": [0, 0, 1, 0, 1, 0, 1, 1]}
    assert facts["row_fill_histogram"] == {"edges": [9, 10], "counts": [2]}
    assert facts | {"length_quantiles": 0, "length_histogram": 0, "row_fill_histogram": 0} == {
        "documents": 4,
        "tokens": 20,
        "rows": 2,
        "pack_size": 10,
        "algorithm": "first_fit_decreasing",
        "efficiency": 1.0,
        "fill": 1.0,
        "packing_factor": 2.0,
        "supervised_share": 0.5,
        "skipped": {"too_long": 2},
        "used": 4,
        "mixture": [],
        "read": 6,
        "length_quantiles": 0,
        "length_histogram": 0,
        "row_fill_histogram": 0,
    }


def test_poor_rows() -> None:
    facts = data_facts(rows_of([6, 6, 6], 10))
    assert (facts["rows"], facts["efficiency"]) == (3, 0.6)
    assert facts["fill"] == pytest.approx(2 / 3)


@given(st.lists(st.integers(2, 300), min_size=1, max_size=40), st.sampled_from(["none", "first_fit_shuffle"]))
@settings(max_examples=30)
def test_histograms_hold_everything_once_in_growing_bins(lengths: list[int], algorithm: str) -> None:
    facts = data_facts(rows_of(lengths, 300, algorithm))
    for name, total in (("length_histogram", len(lengths)), ("row_fill_histogram", facts["rows"])):
        edges, counts = facts[name]["edges"], facts[name]["counts"]
        assert len(counts) == len(edges) - 1 <= 34
        assert sum(counts) == total
        assert np.all(np.diff(edges) > 0)
    assert facts["row_fill_histogram"]["edges"][-1] == 300
    json.dumps(facts)
