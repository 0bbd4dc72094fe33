import json
from itertools import product

import numpy as np
import pytest

from freight.data.pack.batch_size import batch_size_sentence, rows_for_documents
from freight.data.pack.pack_picture import draw
from freight.data.pack.pack_report import advise, expected_longest, measure, table
from freight.data.pack.packing import pack


def report_of(lengths, pack_size, algorithm="first_fit_shuffle", **options):
    rows = pack(lengths, algorithm, pack_size, 0)
    return measure(rows, lengths, sequence_length=pack_size, seed=0, seconds=0.5, **options), rows


def test_numbers_of_a_packing_that_can_be_counted_by_hand():
    # 8 + 2 and 7 in rows of 10
    report, _ = report_of(np.array([8, 2, 7]), 10, "first_fit_decreasing", skipped={"too_long": 2, "empty": 0})
    assert (report.documents, report.rows, report.tokens, report.pads) == (3, 2, 17, 3)
    assert (report.packing_factor, report.efficiency, report.fill) == (1.5, 0.85, 1.0)
    assert report.longest_row == 2
    assert report.attention_pairs == 64 + 4 + 49
    assert report.row_pairs == 200
    assert report.share_above_half == pytest.approx(2 / 3)
    assert report.speedup_over_padding == 30 / 20
    assert report.length_quantiles["median"] == 7
    assert report.length_quantiles["max"] == 8
    words = "\n".join(report.sentences())
    assert "left out: too_long 2" in words
    assert "empty" not in words
    assert json.loads(json.dumps(report.as_dict()))["pads"] == 3


def test_expected_longest_is_the_mean_over_all_draws():
    lengths = np.array([1, 4, 4, 9])
    for count in (1, 2, 3):
        by_hand = np.mean([max(draw) for draw in product(lengths, repeat=count)])
        assert expected_longest(lengths, count) == pytest.approx(by_hand)


def test_table_has_a_column_per_number():
    report, _ = report_of(np.array([8, 2, 7]), 10, "first_fit_decreasing")
    assert table([report]) == [
        "pack_size  algorithm             documents  rows     n  efficiency    fill  longest row  seconds",
        "10         first_fit_decreasing          3     2  1.50       85.0%  100.0%       2 docs     0.50",
    ]


def test_advice_on_good_fill():
    lengths = np.random.default_rng(0).integers(1, 40, 2000)
    assert advise(lengths, 128, 0) == "use first_fit_shuffle: random rows, near-best fill"


def test_advice_to_sort_when_it_pays():
    lengths = np.random.default_rng(0).integers(25, 61, 1000)
    assert advise(lengths, 100, 0) == (
        "fill is poor (91.1%); first_fit_decreasing gives 97.5%. It groups documents of similar length; "
        "watch validation loss"
    )


def test_advice_names_the_cause_and_a_size_that_helps():
    lengths = np.full(1000, 60)
    assert advise(lengths, 100, 0) == (
        "fill is poor (60.0%): 100% of documents are longer than half of pack_size; pack_size 200 gives 89.8%"
    )


def test_advice_on_a_handful_of_documents():
    assert "6 documents make only 2 rows" in advise(np.full(6, 30), 100, 0)


def test_documents_per_step_become_rows_per_step():
    assert rows_for_documents(128, 7.62) == 17
    assert rows_for_documents(1, 7.62) == 1
    assert batch_size_sentence(128, 7.62, 8399) == (
        "global batch 128 documents / n 7.62 = 16.8 -> 17 rows = 129.5 documents on average (+1.2%); "
        "495 steps per epoch"
    )


@pytest.mark.parametrize("lengths", [np.array([1]), np.full(5, 4), np.random.default_rng(0).integers(1, 40, 500)])
def test_picture_of_any_data(tmp_path, lengths):
    report, rows = report_of(lengths, 40)
    draw(tmp_path / "p.png", report, rows, lengths)
    head = (tmp_path / "p.png").read_bytes()
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(head[16:20], "big") > 1500
