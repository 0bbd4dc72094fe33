"""The small run is of the same kind: every switch is on, every relation of sizes is kept, whatever the config."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.config.load import config_from
from freight.config.model import architecture_of
from freight.errors import ConfigError
from freight.parallel.context_method import ContextMethod
from freight.planner.execution import ExecutionPlan, resolve_execution
from freight.verify.shrink import MOST_RANKS, ShrinkError, Shrunk, shrink
from tests.verify.small_configs import CONFIGS, raw_config


def shrunk(raw: dict[str, Any], ranks: int | None = None, **options: Any) -> tuple[ExecutionPlan, Shrunk]:
    config = config_from(raw)
    arch = architecture_of(config.model)
    plan = resolve_execution(config, arch, config.train.micro_batch_tokens or 1024, world_size=ranks)
    return plan, shrink(config, arch, plan, directory="/temporary", **options)


def plan_of(small: Shrunk) -> ExecutionPlan:
    case = small.case
    return resolve_execution(case.config, case.arch, case.microbatch_tokens, world_size=case.world)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    groups, shared = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 3, 7, 8]))
    context = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    methods = ["auto", "ring", "all_gather"] + ["ulysses"] * (groups * shared >= context)
    model = {
        "num_layers": 6,
        "num_attention_heads": groups * shared,
        "num_query_groups": groups,
        "head_dim": 64,
        "hidden_size": draw(st.sampled_from([64 * groups * shared, 256])),
    }
    if draw(st.booleans()):
        kinds = ("sliding_attention", "full_attention")
        model |= {"sliding_window": 128, "layer_types": [kinds[i % 2] for i in range(6)]}
    sections: dict[str, Any] = {"model": model, "train": {"micro_batch_tokens": 48 * 1024}}
    sections["data"] = {"sequence_length": draw(st.sampled_from([16 * 1024, 24 * 1024, 48 * 1024]))}
    model["max_position_embeddings"] = 48 * 1024
    if context > 1:
        sections["parallel"] = {"context": context, "context_method": draw(st.sampled_from(methods))}
    memory = draw(st.sampled_from(["none", "recompute", "fpdt"]))
    if memory == "recompute":
        sections["recompute"] = {"granularity": "full"}
    elif memory == "fpdt":
        if sections.get("parallel", {}).get("context_method") == "ring":
            sections["parallel"]["context_method"] = "auto"
        sections["fpdt"] = {"chunk_tokens": 48 * 64, "offload": draw(st.sampled_from(["none", "host"]))}
    return raw_config(**sections)


@settings(max_examples=60)
@given(configs())
def test_the_small_run_is_of_the_same_kind(raw: dict[str, Any]) -> None:
    before, small = shrunk(raw)
    after, case = plan_of(small), small.case
    assert after.runner == before.runner and after.tier == before.tier
    assert (after.context is None) == (before.context is None)
    assert case.world <= 4
    if before.context is not None and after.context is not None:
        assert after.context.method == before.context.method
        assert (after.context.ulysses > 1) == (before.context.ulysses > 1)
        if before.context.method == ContextMethod.ULYSSES:
            assert (case.arch.groups < after.context_ranks) == (
                raw["model"]["num_query_groups"] < before.context_ranks and raw["model"]["num_query_groups"] > 0
            )
    if after.stream is not None and before.stream is not None:
        chunks, tail = divmod(case.microbatch_tokens, after.stream.chunk_tokens)
        assert chunks == 3 and tail
        assert after.stream.save_attention == before.stream.save_attention and after.stream.kv == before.stream.kv
        assert after.stream.ffn_chunk_tokens is not None and after.stream.ffn_chunk_tokens < after.stream.chunk_tokens
    kinds = set(raw["model"].get("layer_types", ()))
    assert set(case.arch.layer_types or ()) == kinds and case.arch.num_layers == 2
    assert (case.arch.num_attention_heads == case.arch.groups) == (
        raw["model"]["num_attention_heads"] == raw["model"]["num_query_groups"]
    )
    assert case.rows_per_step >= 2 * case.rows_per_microbatch * case.data_ranks
    assert case.rows().rows_in(0, 0) >= 3 * case.rows_per_step


def test_every_change_is_told_once() -> None:
    _, small = shrunk(CONFIGS["fpdt on disk, ulysses"])
    keys = [change.key for change in small.changes]
    assert len(keys) == len(set(keys))
    lines = [str(change) for change in small.changes]
    assert "fpdt.chunk_tokens 256 -> 16" in lines
    assert 'offload.directory "/nowhere" -> "/temporary" (a temporary folder)' in lines
    assert 'train.schedule.name "cosine" -> "constant" (three steps)' in lines
    assert "adapter.alpha 16.0 -> 8.0 (the same scale)" in lines


def test_what_is_kept_is_kept() -> None:
    _, small = shrunk(CONFIGS["plain"], keep=["model.hidden_size", "model.num_layers", "train.grad_clip"])
    assert small.case.arch.hidden_size == 128 and small.case.arch.num_layers == 4
    assert small.case.config.train.grad_clip == 1.0
    assert not {"model.hidden_size", "model.num_layers", "train.grad_clip"} & {change.key for change in small.changes}


def test_ranks_of_the_users_run_are_dealt_out_and_made_fewer() -> None:
    _, small = shrunk(CONFIGS["ring"], ranks=32)
    assert (small.case.data_ranks, small.case.context_ranks) == (2, 2)
    _, small = shrunk(CONFIGS["ring"], ranks=8, full_mesh=True)
    assert (small.case.data_ranks, small.case.context_ranks) == (2, 4)
    _, small = shrunk(CONFIGS["plain"], ranks=6)
    assert (small.case.data_ranks, small.case.context_ranks) == (3, 1)


def test_too_many_ranks_are_refused_with_the_axis() -> None:
    with pytest.raises(ShrinkError, match=rf"at most {MOST_RANKS} run here. Make `parallel.context` smaller"):
        shrunk(CONFIGS["ring"], ranks=16, full_mesh=True)


def test_what_is_kept_may_be_too_large() -> None:
    raw = raw_config(model={"vocab_size": 200_000, "hidden_size": 1024})
    with pytest.raises(ShrinkError, match="parameters; at most"):
        shrunk(raw, keep=["model.vocab_size", "model.hidden_size"])


def test_what_is_kept_may_not_fit_the_rest() -> None:
    raw = raw_config(model={"num_attention_heads": 21, "num_query_groups": 3, "head_dim": 8})
    with pytest.raises(ShrinkError, match=r"does not fit \(kept: model.num_attention_heads\): .* 2 does not divide 21"):
        shrunk(raw, keep=["model.num_attention_heads"])


def test_positions_stay_but_where_they_cost_or_matter() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    _, small = shrunk(raw_config(model={"rope": {"scaling": yarn}}))
    assert small.case.arch.max_position_embeddings == 2048
    _, small = shrunk(raw_config(model={"position_embedding": "learned"}))
    assert small.case.arch.max_position_embeddings == 112
    factors = [1.0 + i for i in range(8)]
    longrope = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    longrope["original_max_position_embeddings"] = 512
    _, small = shrunk(raw_config(model={"rope": {"scaling": longrope}}))
    scaling = small.case.arch.rope.scaling
    assert (
        scaling is not None and scaling.original_max_position_embeddings == 28 and len(scaling.long_factor or ()) == 4
    )


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.num_layer", r"names no key of the configuration. Did you mean `model.num_layers`"),
        ("train.steps", r"has no effect: verify does not make it small"),
    ],
)
def test_a_key_that_cannot_be_kept_is_refused(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shrunk(CONFIGS["plain"], keep=[key])
