"""`freight verify` as a user calls it: what it prints, and its five exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from freight.cli.main import app
from freight.verify import ranks as ranks_module
from freight.verify.ranks import RankPool
from tests.verify.small_configs import CONFIGS


@pytest.fixture
def freight(ranks: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command on the session's ranks, with one of the small configurations."""

    @contextmanager
    def living(*_: Any) -> Iterator[RankPool]:
        yield ranks

    monkeypatch.setattr(ranks_module, "RankPool", living)

    def run(name: str, *arguments: str) -> Result:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(CONFIGS[name]))
        result = CliRunner().invoke(app, ["verify", str(path), *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


def test_an_equal_config_exits_with_0_and_says_what_was_compared(freight: Any) -> None:
    result = freight("plain", "model.num_layers=3", "--keep", "model.num_layers")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "small run of the same kind, on made-up documents:"
    assert "  model.hidden_size 128 -> 32" in lines
    assert not any(line.startswith("  model.num_layers") for line in lines)
    assert "gradients, worst first:" in lines and lines[-1] == "verdict: equal"


def test_a_different_one_exits_with_1_and_names_the_tensor(freight: Any) -> None:
    result = freight("plain", "--sabotage", "no_clipping")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "verdict: DIFFERENT" in lines
    assert lines[-2].startswith("first in the order of execution: clip coefficient of step 0, shape []: its value is 1")
    assert lines[-1] == "switched off one at a time: equal without train.grad_clip"


def test_json_is_one_line(freight: Any) -> None:
    result = freight("plain", "--json", "--sabotage", "embedding_twice")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and report["equal"] is False
    assert report["first"]["name"] == "gradient of embed_tokens.weight in step 0"
    assert {claim["name"] for claim in report["claims"] if not claim["ok"]} >= {"gradients", "grad norm"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.num_layer=3"], "Did you mean `model.num_layers`"),
        (["--keep", "model.width"], "`--keep model.width` names no key"),
        (["--ranks", "3", "parallel.context=2"], "`parallel.context` 2 must divide the 3 processes"),
        (["--sabotage", "everything"], "`--sabotage everything` does not exist"),
        (["--sabotage", "skipped_merge"], "`--sabotage skipped_merge` needs a ring; this config has none"),
        (["--dtype", "fp8"], "`--dtype` must be one of fp64, fp32, bf16; got fp8"),
        (["--device", "tpu"], "`--device` must be cpu or cuda; got tpu"),
    ],
)
def test_a_wrong_config_exits_with_2(freight: Any, arguments: list[str], message: str) -> None:
    result = freight("plain", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr and not result.stdout


def test_a_rank_that_fails_exits_with_3_and_its_own_words(freight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freight.verify.prove.run_jobs", _fail)
    result = freight("plain")
    assert result.exit_code == 3
    assert result.stderr.splitlines()[-1] == "error: rank 0 failed: ValueError: no room on the tier"


def _fail(*_: Any) -> None:
    raise ValueError("no room on the tier")


def test_what_is_too_large_exits_with_4(freight: Any) -> None:
    result = freight("ring", "--ranks", "16", "--full-mesh")
    assert result.exit_code == 4
    assert "4 context x 4 data ranks are 16 processes; at most 8 run here" in result.stderr


def test_help_has_an_example_and_hides_the_faults() -> None:
    result = CliRunner().invoke(app, ["verify", "--help"])
    assert result.exit_code == 0
    assert "Example: freight verify run.yaml" in result.output and "--sabotage" not in result.output
