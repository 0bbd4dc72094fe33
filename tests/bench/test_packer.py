"""The packer's benchmark on few lengths: its own scans agree with the tree, its numbers are what they are called."""

import numpy as np
import pytest

from freight.bench.packer import lengths_by_law, rescanning_first_fit, run, scanning_first_fit
from freight.errors import ConfigError
from tests.oracles import packing as oracle


@pytest.fixture(scope="module")
def result():
    return run({"documents": 2000, "scan": 512, "memory": 8000})


def test_numbers_are_what_they_are_called(result):
    table = result["table"]
    assert result["seconds_1m"] == max(line["seconds"] for line in table)
    decreasing = [line["fill_of_bound"] for line in table if line["algorithm"] != "first_fit_shuffle"]
    assert result["fill_of_bound"] == min(decreasing)
    assert {line["law"] for line in table} == {"lognormal", "bimodal", "uniform"}
    assert result["speedup_64k"] == pytest.approx(result["scan_64k_seconds"] / result["tree_64k_seconds"], rel=0.3)
    assert 0 < result["bytes_per_document"] < 200
    assert 0.9 < result["fill_of_bound_real"] <= 1


def test_laws_have_the_lengths_they_promise():
    laws = lengths_by_law(5000)
    assert all(lengths.min() >= 1 and lengths.max() <= 2048 for lengths in laws.values())
    assert not np.any((laws["bimodal"] >= 200) & (laws["bimodal"] < 900))
    assert {name: lengths[0] for name, lengths in lengths_by_law(5000).items()} == {
        name: lengths[0] for name, lengths in laws.items()
    }


def test_both_scans_are_first_fit():
    lengths = lengths_by_law(60)["uniform"].tolist()
    rows = oracle.first_fit(lengths, 2048)
    expected = [next(number for number, row in enumerate(rows) if document in row) for document in range(60)]
    assert rescanning_first_fit(lengths, 2048) == scanning_first_fit(lengths, 2048) == expected


@pytest.mark.parametrize("options", [{"document": 9}, {"documents": 0}, {"scan": "many"}, {"memory": True}])
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ConfigError, match=r"does not exist|must be at least 8|must be of type int"):
        run(options)
