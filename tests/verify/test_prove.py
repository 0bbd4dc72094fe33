"""Every switch, alone and with others, leaves what one plain process computes; and verify says so."""

from __future__ import annotations

import json

import pytest

from freight.config.load import config_from
from freight.verify.ranks import RankPool
from freight.verify.report import as_json, report_lines
from freight.verify.sabotage import SABOTAGES, check_sabotage
from tests.verify.small_configs import CONFIGS, prove

ALWAYS = {
    "weights drawn as one process draws them",
    "token ids, positions, labels",
    "inside the layers",
    "token count",
    "loss",
    "gradients",
    "grad norm",
    "clip coefficient",
    "parameters",
    "each document alone",
    "one document replaced: others unchanged",
}
SAME_BITS = {
    "recompute": ["another tier: the same bits", "recompute off: the same bits"],
    "recompute on disk": [
        "overlap.context off: the same bits",
        "another tier: the same bits",
        "recompute off: the same bits",
    ],
    "ring": ["overlap.context off: the same bits"],
    "hybrid": ["overlap.context off: the same bits"],
    "fpdt on host": ["another tier: the same bits"],
    "fpdt on disk, ulysses": ["another tier: the same bits"],
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_equal(ranks: RankPool, name: str) -> None:
    proof = prove(ranks, name)
    assert proof.equal and proof.first is None, "\n".join(report_lines(proof))
    claims = {claim.name: claim for claim in proof.claims}
    assert claims.keys() >= ALWAYS | set(SAME_BITS.get(name, ()))
    assert ("all ranks report the same" in claims) == (proof.case.world > 1)
    assert len(claims["gradients"].errors) >= 6
    assert json.loads(json.dumps(as_json(proof)))["equal"] is True


# What each fault is shown with, and the first tensor in the order of execution that must be named.
CAUGHT = {
    "causal_diagonal": ("plain", "layers.0.attention.context of step 0, microbatch 0"),
    "skipped_merge": ("ring", "layers.0.attention.context of step 0, microbatch 0"),
    "wide_window": ("window", "layers.0.attention.context of step 0, microbatch 0"),
    "stale_chunk": ("fpdt", "layers.0.attention.context of step 0, microbatch 0"),
    "unsummed_heads": ("ulysses", "gradient of layers.1.attention.v_proj.weight in step 0"),
    "later_positions": ("plain", "position_ids of step 0, microbatch 0"),
    "dropped_boundary": ("plain", "layers.0.attention.context of step 0, microbatch 0"),
    "labelled_padding": ("plain", "labels of step 0, microbatch 0"),
    "late_shift": ("ring", "labels of step 0, microbatch 0"),
    "lost_rank": ("uneven batch", "gradient of norm.weight in step 0"),
    "times_context": ("ring", "gradient of norm.weight in step 0"),
    "lost_microbatch": ("plain", "gradient of norm.weight in step 0"),
    "mean_per_rank": ("uneven batch", "token count of step 0"),
    "local_norm": ("uneven batch", "grad norm of step 0"),
    "no_clipping": ("plain", "clip coefficient of step 0"),
    "decayed_norms": ("plain", "parameter layers.0.attention_norm.weight after step 0"),
    "embedding_twice": ("plain", "gradient of embed_tokens.weight in step 0"),
    "lost_ffn_chunk": ("fpdt", "gradient of layers.1.mlp.down_proj.weight in step 0"),
    "rounded_tier": ("fpdt on host", "gradient of layers.1.mlp.down_proj.weight in step 0"),
    "stale_input": ("recompute", "gradient of layers.1.mlp.down_proj.weight in step 0"),
    "lora_scale": ("lora", "layers.0.attention.q of step 0, microbatch 0"),
    "local_dropout": ("lora, all-gather", "layers.0.attention.q of step 0, microbatch 0"),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_fault_is_caught_and_the_tensor_named(ranks: RankPool, name: str) -> None:
    config, tensor = CAUGHT[name]
    check_sabotage(name, config_from(CONFIGS[config]))
    proof = prove(ranks, config, name, look_for_cause=False)
    assert not proof.equal
    assert proof.first is not None and proof.first.name == tensor
    assert "verdict: DIFFERENT" in list(report_lines(proof))


def test_a_factor_is_explained_and_the_switch_found(ranks: RankPool) -> None:
    proof = prove(ranks, "ring", "times_context")
    assert proof.first is not None and proof.first.ratio == pytest.approx(2)
    assert proof.first.hint == "looks like a missing division by context"
    assert proof.culprits == ("parallel.context",) and not proof.together
    lines = list(report_lines(proof))
    assert lines[-1] == "switched off one at a time: equal without parallel.context"
    assert "x 2.000: looks like a missing division by context" in lines[-2]
    assert as_json(proof)["first"]["hint"] == proof.first.hint


def test_the_tier_at_fault_is_found(ranks: RankPool) -> None:
    proof = prove(ranks, "fpdt on host", "rounded_tier")
    assert proof.culprits == ("offload", "fpdt")


def test_a_fault_without_a_switch_is_said_to_be_in_what_all_share(ranks: RankPool) -> None:
    proof = prove(ranks, "plain", "decayed_norms")
    assert proof.culprits == ()
    assert list(report_lines(proof))[-1].startswith("switched off one at a time: it stays different")


def test_dtypes_of_devices_are_compared_more_loosely(ranks: RankPool) -> None:
    for dtype in ("fp32", "bf16"):
        proof = prove(ranks, "window", dtype=dtype)
        assert proof.equal, "\n".join(report_lines(proof))
        assert max(claim.error for claim in proof.claims) > 1e-9
    assert not prove(ranks, "window", "wide_window", dtype="bf16", look_for_cause=False).equal
