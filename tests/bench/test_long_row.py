"""The long-row benchmark, short."""

from __future__ import annotations

import pytest

from freight.bench.long_row import run


@pytest.mark.usefixtures("mesh")
def test_a_streamed_step_has_the_losses_of_a_plain_forward_everywhere() -> None:
    result = run({"tokens": 300, "chunk_tokens": 64, "probe_tokens": 32, "hidden": 64, "vocab": 64, "threads": 1})
    assert result["probes"] == 10 and result["within_limit"]
    assert result["loss"] == pytest.approx(result["reference_loss"], abs=1e-6)
    assert 0 < result["largest_token_difference"] < 1e-5 and result["largest_probe_difference"] < 1e-6
    assert not run({"tokens": 100, "chunk_tokens": 32, "hidden": 64, "vocab": 64, "limit_bytes": 1})["within_limit"]
