"""Random bad input gives no traceback, loses nothing in silence and does not hang; and if it did, it would be seen."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.bench import fuzz
from freight.bench.fuzzing.judge import holds
from freight.data.read import rejects
from freight.data.render import encode
from freight.errors import ConfigError

MUST_BE_ZERO = ("tracebacks", "silent_losses", "hangs")


def bad_of(result):
    return {name: result[name] for name in MUST_BE_ZERO if result[name]}


@settings(max_examples=5)
@given(st.integers(0, 2**32))
def test_any_seed_finds_nothing(seed):
    result = fuzz.run({"cases": 25, "seed": seed})
    assert not bad_of(result), result["findings"]


def test_every_kind_of_input_is_seen_accepted_and_refused():
    result = fuzz.run({"cases": 150, "seed": 1})
    assert not bad_of(result), result["findings"]
    outcomes = {name: count for name, count in result.items() if name.endswith(("_accepted", "_refused"))}
    assert set(outcomes) == {f"{kind}_{how}" for kind in fuzz.KINDS for how in ("accepted", "refused")}
    assert sum(outcomes.values()) == result["cases"] == 150
    assert len(result["done"]) > 50 and len(result["reject_reasons"]) > 6


def test_a_case_comes_again_by_its_number():
    (alone,) = (fuzz.run({"case": 7, "seed": 3}) for _ in range(1))
    assert alone["cases"] == 1 and alone["done"] == fuzz.run({"case": 7, "seed": 3})["done"]


def test_a_record_that_teaches_less_than_it_says_is_found(monkeypatch):
    whole = encode.mask_tokens

    def short(*given):
        mask = whole(*given)
        last = mask.targets.nonzero()[0][-1:]
        mask.targets[last] = False
        return dataclasses.replace(mask)

    monkeypatch.setattr(encode, "mask_tokens", short)
    result = fuzz.run({"cases": 30, "kind": "records"})
    assert result["silent_losses"] > 0 and "not " in result["findings"]["silent_losses"][0]["what"]


def test_a_record_that_is_neither_used_nor_rejected_is_found(monkeypatch):
    numbers = itertools.count(1000)
    whole = rejects.describe_reject
    monkeypatch.setattr(rejects, "describe_reject", lambda *given: {**whole(*given), "line": next(numbers)})
    result = fuzz.run({"cases": 40, "kind": "records"})
    assert result["silent_losses"] > 0 and "rejected [1000" in result["findings"]["silent_losses"][0]["what"]


def test_other_errors_and_hangs_are_found_with_their_case(monkeypatch, capsys):
    def loop(*given, **options):
        while True:
            pass

    def wrong(*given, **options):
        return {}["key"]

    monkeypatch.setattr(fuzz, "CASE_SECONDS", 0.1)
    for broken, name in ((wrong, "tracebacks"), (loop, "hangs")):
        monkeypatch.setattr(fuzz, "load_config", broken)
        result = fuzz.run({"cases": 12, "kind": "config", "seed": 5})
        (first, *_) = result["findings"][name]
        assert result[name] > 0 and set(bad_of(result)) == {name}
        assert fuzz.run({"case": first["case"], "seed": 5})[name] == 1
        assert f'{name}: {{"seed": 5, "case": {first["case"]}' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "parts", "held"),
    [("a b<e>c", ["ab", "c"], True), ("a", ["a", "a"], False), ("cab", ["ab", "c"], False), ("", [""], True)],
)
def test_parts_are_held_in_order(found, parts, held):
    assert holds(found, parts) is held


@pytest.mark.parametrize("options", [{"cases": "many"}, {"case": "7"}, {"kind": "recrods"}, {"sede": 3}])
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ConfigError, match=r"must be|does not exist"):
        fuzz.run(options)
