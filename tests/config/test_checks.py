"""Rules between keys: combinations that are wrong, and options that would do nothing."""

from __future__ import annotations

import pytest

from freight.config.checks import fit_faults, schedule_faults
from freight.config.load import load_config
from freight.config.model_checks import architecture_faults
from freight.config.presets import preset
from freight.config.schema import ScheduleConfig
from freight.errors import ConfigError
from tests.config.example import example, put, write


def faults_of(folder, changes) -> list[str]:
    raw = example(folder)
    for key, value in changes.items():
        put(raw, key, value)
    try:
        load_config(write(folder, raw))
    except ConfigError as error:
        return list(error.faults)
    return []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train.steps": None}, "exactly one of `train.steps` and `train.epochs` must be set; got neither"),
        ({"train.epochs": 2}, "got 10 and 2. Set one, the other null."),
        ({"train.global_batch_tokens": 256}, "got global_batch_size 4 and global_batch_tokens 256. Keep one."),
        ({"train.global_batch_size": None}, "must be set; got none."),
        (
            {"train.global_batch_size": None, "train.global_batch_tokens": 300},
            "`train.global_batch_tokens` must be a multiple of pack_size = 128; got 300. Use 256 or 384.",
        ),
        ({"train.micro_batch_tokens": 100}, "got 100. Use 128."),
        (
            {"data.packing": None, "train.micro_batch_tokens": 100},
            "must be a multiple of `data.sequence_length` = 64; got 100. Use 64 or 128.",
        ),
        (
            {"data.sequence_length": 256},
            "`data.sequence_length` 256 > `data.packing.pack_size` 128: a document must fit in a row.",
        ),
        (
            {"data.packing.document_multiple": 48},
            "must be a multiple of `data.packing.document_multiple` 48; got 128. Use 96 or 144.",
        ),
        (
            {"data.format": "messages", "data.packing.algorithm": "split"},
            "split cuts answers from their prompts",
        ),
        ({"data.format": "messages", "data.truncation": "split"}, "split cuts answers from their prompts"),
        ({"data.format": "messages", "data.truncation": "cut_left"}, "Use drop_oldest_turns."),
        ({"data.format": "text", "data.truncation": "drop_oldest_turns"}, "needs chats"),
        ({"data.format": "text", "data.train_on": "assistant"}, "`data.format` text trains on all. Remove it."),
        ({"data.assistant_start": "<a>"}, "`data.assistant_start` is given without `data.assistant_end`"),
        ({"data.packing.file": "F", "data.truncation": "drop"}, "`data.truncation` has no effect: only packed rows"),
        ({"data.packing.file": "F", "data.train_on": "all"}, "`data.train_on` has no effect: only packed rows"),
        ({"data.max_skipped_fraction": 0.5}, "has no effect with `data.on_bad_record: error`"),
        ({"data.packing.algorithm": "none", "data.packing.seed": 1}, "`data.packing.seed` has no effect"),
        ({"data.num_workers": 0, "data.prefetch_batches": 4}, "`data.prefetch_batches` has no effect"),
        ({"data.shuffle": False, "data.packing": None, "data.seed": 1}, "`data.seed` has no effect"),
        ({"data.tokenizer": None}, "`data.tokenizer` is missing, and without `model.hf` there is none to take."),
        ({"train.evaluate_every_steps": 5}, "has no effect without `data.validation`"),
        ({"train.optimizer.betas": [0.9, 1.0]}, "`train.optimizer.betas` must be at least 0 and below 1; got 1."),
        ({"checkpoint.save_final": False, "checkpoint.keep": 3}, "`checkpoint.keep` has no effect: nothing is saved."),
        ({"checkpoint.save_final": False, "checkpoint.async": True}, "`checkpoint.async` has no effect"),
        ({"attention.backend": "math", "attention.disable": ["math"]}, "is in `attention.disable`"),
        ({"attention.backend": "math", "attention.disable": ["flash"]}, "`attention.disable` has no effect"),
        ({"log.profile": {"start_step": 10, "steps": 1}}, "is never reached in 10 steps"),
        ({"model.hf": "."}, "`model.hf` and `model.preset` are both given"),
        ({"model": {}}, "`model` is missing. Set `model.hf`"),
        ({"model": {"num_layers": 2}}, "`model.hidden_size` is missing"),
        ({"data.sequence_length": 10000, "data.packing": None}, "at most the model's 8192 positions; got 10000."),
    ],
)  # fmt: skip
def test_a_wrong_combination_is_one_sentence(tmp_path, changes, sentence):
    (tmp_path / "F").touch()
    if "data.packing.file" in changes:
        changes = changes | {"data.packing.file": str(tmp_path / "F")}
    faults = faults_of(tmp_path, changes)
    assert any(sentence in fault for fault in faults), faults


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train.steps": None, "train.epochs": 0.5},
        {"train.micro_batch_tokens": 512},
        {"data.packing": {}},
        {"data.packing": None},
        {"data.format": "text", "data.truncation": "split", "data.packing.algorithm": "split"},
        {"data.format": "messages", "data.truncation": "drop_oldest_turns"},
        {"checkpoint.save_final": False},
        {"data.shuffle": False, "data.seed": 1},
        {"train.schedule": {"name": "constant", "warmup_steps": 3}},
    ],
)
def test_a_right_combination_passes(tmp_path, changes):
    assert faults_of(tmp_path, changes) == []


@pytest.mark.parametrize(
    ("changes", "steps", "sentence"),
    [
        ({"warmup_steps": 11}, 10, "must be at most the run's 10 steps; got 11"),
        ({"name": "wsd", "warmup_steps": 4, "stable_steps": 3, "decay_steps": 4}, 10, "got 11"),
        ({"name": "wsd"}, None, "wsd needs decay_steps or stable_steps; got neither"),
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, None, "both set the warm-up; got 1 and 0.1"),
        ({"name": "constant", "min_lr_ratio": 0.0}, 10, "`train.schedule.min_lr_ratio` has no effect"),
        ({"name": "constant", "decay_steps": 2}, 10, "`train.schedule.decay_steps` has no effect"),
        ({"stable_steps": 2}, 10, "`train.schedule.stable_steps` has no effect with `name: cosine`"),
    ],
)
def test_schedules_that_cannot_be(changes, steps, sentence):
    """Schedule off by one: warm-up above the total is a config error."""
    assert any(sentence in fault for fault in schedule_faults(ScheduleConfig(**changes), steps))


def test_warmup_of_all_steps_and_of_none_is_fine():
    assert not list(schedule_faults(ScheduleConfig(warmup_steps=10), 10))
    assert not list(schedule_faults(ScheduleConfig(name="wsd", warmup_steps=4, stable_steps=2, decay_steps=4), 10))
    assert not list(schedule_faults(ScheduleConfig(warmup_steps=0, decay_steps=0), 10))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"num_attention_heads": 8, "num_query_groups": 3},
            "`model.num_query_groups` must divide `model.num_attention_heads`; 3 does not divide 8. "
            "Use 1, 2 or 4, or null for MHA.",
        ),
        (
            {"num_attention_heads": 8, "num_query_groups": 16},
            "must be between 1 and `model.num_attention_heads`; got 16 with 8 heads. Use null for MHA.",
        ),
        (
            {"hidden_size": 100, "num_attention_heads": 8, "num_query_groups": None},
            "`model.head_dim` is null and `model.hidden_size` 100 is not a multiple of `model.num_attention_heads` 8. "
            "Set `model.head_dim`.",
        ),
        (
            {"sliding_window": 0},
            "`model.sliding_window` must be at least 1 or null; got 0. Use null for full attention.",
        ),
        (
            {"attention_softcap": 0.0},
            "`model.attention_softcap` must be a finite number above 0, or null; got 0.0. Use null to switch it off.",
        ),
        ({"final_softcap": -30.0}, "`model.final_softcap` must be a finite number above 0, or null; got -30.0."),
        ({"layer_types": ["full_attention"]}, "one entry per layer, `model.num_layers` = 2; got 1"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "`model.sliding_window` is null. Set the window."),
        (
            {"layer_types": ["full_attention"] * 2, "sliding_window": 4},
            "`model.sliding_window` 4 has no effect",
        ),
        ({"norm": "layernorm", "norm_offset": True}, "`model.norm_offset` needs `model.norm: rmsnorm`"),
        ({"parallel_residual": True, "norm_placement": "sandwich"}, "cannot be combined"),
        ({"position_embedding": "learned", "rope": {"theta": 1e4}}, "`model.rope` has no effect"),
        (
            {"head_dim": 64, "rope": {"percent": 0.3}},
            "`model.rope.percent` 0.3 of head_dim 64 rotates 19 dims; the number must be even and above 0. "
            "Use 0.3125 (20 dims) or 0.28125 (18 dims).",
        ),
        ({"rope": {"scaling": {"type": "linear"}}}, "`model.rope.scaling.factor` is missing; `linear` needs factor."),
        (
            {"rope": {"scaling": {"type": "llama3", "factor": 8.0}}},
            "`model.rope.scaling.low_freq_factor`, `model.rope.scaling.high_freq_factor` are missing",
        ),
        (
            {"rope": {"scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}}},
            "`model.rope.scaling.low_freq_factor` has no effect with `type: linear`",
        ),
        (
            {
                "head_dim": 64,
                "rope": {"scaling": {"type": "longrope", "short_factor": [1.0] * 24, "long_factor": [1.0] * 32}},
            },
            "`model.rope.scaling.short_factor` has 24 numbers; head_dim 64 with 64 rotated dims needs 32.",
        ),
        ({"rope": {"scaling": {"type": "linear", "factor": 0.5}}}, "`model.rope.scaling.factor` must be at least 1"),
        ({"rope_sliding": {"theta": 1e4}}, "`model.rope_sliding` has no effect while `model.sliding_window` is null"),
    ],
)  # fmt: skip
def test_architectures_that_cannot_be(changes, sentence):
    arch = type(preset("debug")).model_validate(preset("debug").model_dump(exclude_unset=True) | changes)
    faults = architecture_faults(arch)
    assert any(sentence in fault for fault in faults), faults


@pytest.mark.parametrize("cap", [0, -1, "inf"])
def test_softcap_is_off_by_null_only(tmp_path, cap):
    """Softcap and query scale: 0, negative and inf are config errors."""
    value = float(cap)
    (fault,) = faults_of(tmp_path, {"model.attention_softcap": value})
    assert fault.startswith("`model.attention_softcap` must be a")


def test_a_sequence_longer_than_the_model_is_refused_for_learned_and_rotary_positions(tmp_path):
    config = load_config(write(tmp_path, put(example(tmp_path), "data.sequence_length", 65)), check_files=False)
    for changes, stretch in (({}, True), ({"position_embedding": "learned"}, False)):
        arch = preset("debug").model_copy(update={"max_position_embeddings": 64, **changes})
        (fault,) = fit_faults(config, arch)
        assert fault.startswith("`data.sequence_length` must be at most the model's 64 positions; got 65.")
        assert ("scaling" in fault) == stretch
        assert fit_faults(config, arch.model_copy(update={"max_position_embeddings": 65})) == []
