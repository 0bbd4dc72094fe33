"""Every example config is one that Freight takes, and says what to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from freight.config.load import load_config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {"sft", "pretrain"}


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_loads_without_a_notice(path: Path) -> None:
    notices: list[str] = []
    config = load_config(path, notice=notices.append, check_files=False)
    assert not notices
    assert config.log.dir == f"runs/{path.stem}"


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_names_its_command(path: Path) -> None:
    assert f"freight train examples/{path.name}" in path.read_text(encoding="utf-8")
