"""A run on several ranks is the run of one process: losses, evaluation, parameters, saved state, the way it stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freight.verify.ranks import RankPool
from freight.verify.tolerances import close
from tests.train.rank_tasks import Outcome, run_tiny

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two data ranks": (2, {}),
    "two context ranks": (2, {"parallel": {"context": 2}}),
    "two of two, ring, without overlap": (
        4,
        {"parallel": {"context": 2, "context_method": "ring"}, "overlap": {"context": False}},
    ),
    "four, hybrid": (4, {"parallel": {"context": 4, "context_method": "hybrid", "ulysses": 2}}),
    "recomputed": (2, {"recompute": {"granularity": "full"}, "offload": {"layer_inputs": "host"}}),
    "streamed": (2, {"parallel": {"context": 2}, "fpdt": {"chunk_tokens": 12, "loss_chunk_tokens": 4}}),
    "streamed over rows": (
        4,
        {
            "parallel": {"context": 4, "ulysses": 2, "context_method": "hybrid"},
            "fpdt": {"chunk_tokens": 16, "offload": "host"},
        },
    ),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run of one process, and its checkpoints."""
    return run_tiny(tmp_path_factory.mktemp("straight"), {})


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    for step, wanted in expected.metrics.items():
        got = outcome.metrics[step]
        assert got["train/loss"] == pytest.approx(wanted["train/loss"], abs=2e-6), step
        assert got["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-4), step
        for name in ("train/targets", "train/tokens", "train/epoch", "train/lr"):
            assert got[name] == pytest.approx(wanted[name]), (step, name)
    for name, tensor in expected.tensors.items():
        assert close(outcome.tensors[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_on_ranks_equals_that_of_one_process(
    ranks: RankPool, straight: Outcome, tmp_path: Path, layout: str
) -> None:
    world, sections = LAYOUTS[layout]
    first, *others = ranks.run(run_tiny, world, tmp_path, sections)
    assert_same(first, straight)
    assert first.evaluation.loss == pytest.approx(straight.evaluation.loss, abs=2e-6)
    for outcome in (first, *others):
        assert (outcome.evaluation.tokens, outcome.evaluation.documents) == (
            straight.evaluation.tokens,
            straight.evaluation.documents,
        )
        assert outcome.exit_code == 0
    balances = [step.get("context/balance") for step in first.metrics.values()]
    assert all(b is None for b in balances) if "context" not in sections.get("parallel", {}) else min(balances) > 0.5
    assert all(not other.lines and not other.metrics for other in others), "only the first rank speaks"


@pytest.mark.parametrize(("saved", "resumed"), [(1, 2), (2, 4), (4, 1)])
def test_saved_state_of_any_layout_resumes_on_any_other(
    ranks: RankPool, straight: Outcome, tmp_path: Path, saved: int, resumed: int
) -> None:
    sections = {n: {"parallel": {"context": min(n, 2)}} for n in (1, 2, 4)}
    ranks.run(run_tiny, saved, tmp_path, sections[saved])
    checkpoint = tmp_path / "checkpoints" / "step-000002"
    outcome = ranks.run(run_tiny, resumed, tmp_path / "resumed", sections[resumed], checkpoint)[0]
    assert min(outcome.metrics) == 3
    expected = Outcome({k: v for k, v in straight.metrics.items() if k > 2}, *list(vars(straight).values())[1:])
    assert_same(outcome, expected)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run(run_tiny, 2, tmp_path, {}, None, 2)
    assert {outcome.exit_code for outcome in outcomes} == {143}
    assert all(outcome.message.startswith("stopped by SIGTERM after step 2 of ") for outcome in outcomes)
    assert (tmp_path / "checkpoints" / "step-000002").exists()
