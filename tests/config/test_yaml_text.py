"""YAML that is not what it seems."""

from __future__ import annotations

import pytest

from freight.config.load import load_config
from freight.config.yaml_text import read_mapping
from freight.errors import ConfigError

BOMB = "a0: &a0 [x]\n" + "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (BOMB, "more than 100,000 values"),
        ("a: &a [*a]", "nested more than 40 levels deep, or an anchor that holds itself"),
        ("a: &a {b: *a}", "anchor that holds itself"),
        ("a: " + "[" * 60 + "]" * 60, "nested more than 40"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: !!set {b}", "YAML's type set"),
        ("a: !!binary eA==", "YAML's type bytes"),
        ("a: !!bool x", "a tag such as `!!bool`"),
        ("a: !!int x", "broken YAML"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
    ],
)
@pytest.mark.timeout(10)
def test_yaml_that_no_config_may_hold_is_one_line_at_once(tmp_path, text, sentence):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_dates_stay_text_however_they_are_tagged(tmp_path):
    path = tmp_path / "dates.yaml"
    path.write_text("a: !!timestamp 2001-01-01\nb: 2001-01-01\nc: !!timestamp x\n")
    assert read_mapping(path) == {"a": "2001-01-01", "b": "2001-01-01", "c": "x"}
