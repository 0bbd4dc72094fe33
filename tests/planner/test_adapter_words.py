"""What the plan says of an adapter: modules, scale, and how much is trained."""

from __future__ import annotations

from pathlib import Path

from freight.assemble.adapters import targets_for
from freight.assemble.build import architecture_for
from freight.planner.plan import Plan
from freight.planner.resolve import resolve
from freight.planner.words import plan_words
from tests.train.tiny_run import config


def plan_of(**adapter: object) -> Plan:
    run = config(Path("unused"), adapter=adapter)
    arch = architecture_for(run)
    return resolve(run, arch, adapted=targets_for(run, arch))


def test_words_of_an_adapter() -> None:
    plan = plan_of(
        rank=4, alpha=8, use_rslora=True, use_dora=True, dropout=0.1, layers=[1], target_modules=["q_proj", "up_proj"]
    )
    words = plan_words(plan)
    assert any(
        line
        == "adapter: DoRA of rank 4, scale 4 (alpha / sqrt(rank)), on 2 linear modules of layers 1: q_proj, up_proj"
        for line in words
    )
    lengths, pairs = 32 + 48, 4 * (32 + 32) + 4 * (32 + 48)
    assert (plan.decaying, plan.not_decaying) == ((4, pairs), (2, lengths))
    assert any(line.startswith("trained: 656 of ") and "kept once, in fp32" in line for line in words)
    assert "changes the results beyond rounding: adapter dropout 0.1" in words


def test_modules_in_full_are_trained_and_not_frozen() -> None:
    plan = plan_of(rank=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "model.norm"])
    whole = config(Path("unused"))
    everything = resolve(whole, architecture_for(whole))
    assert plan.not_decaying == (1, 32)
    assert plan.decaying == (5, 64 * 32 + 2 * 4 * (32 + 32))
    assert plan.frozen.parameters + 64 * 32 + 32 == everything.decaying.parameters + everything.not_decaying.parameters
    assert any("; in full: embed_tokens, norm" in line for line in plan_words(plan))
    assert everything.frozen == (0, 0) and not any(line.startswith("adapter") for line in plan_words(everything))
