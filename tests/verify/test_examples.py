"""The small twin of every shipped streamed config is equal to one plain process."""

from __future__ import annotations

from pathlib import Path

import pytest

from freight.config.load import load_config
from freight.config.model import architecture_of
from freight.verify.prove import Prover
from freight.verify.ranks import RankPool
from freight.verify.report import report_lines

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("fpdt_*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_its_twin_is_equal(ranks: RankPool, path: Path) -> None:
    config = load_config(path, check_files=False)
    proof = Prover(ranks).prove(config, architecture_of(config.model), look_for_cause=False)
    assert proof.equal, "\n".join(report_lines(proof))
    assert proof.case.world == 2 and proof.case.config.fpdt is not None
    chunks = proof.case.microbatch_tokens / proof.case.config.fpdt.chunk_tokens
    assert chunks > 3 and chunks % 1, "several chunks, the last one shorter"
