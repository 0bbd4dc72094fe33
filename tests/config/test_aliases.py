"""Names of other trainers: read as ours with a notice, refused where they disagree or mean what is not there."""

from __future__ import annotations

import re

import pytest

from freight.config.aliases import ALIASES, LACKING
from freight.config.keys import known
from freight.config.load import load_config
from freight.config.reference import _DERIVED
from freight.config.schema import Config
from freight.errors import ConfigError
from tests.config.example import example, put, write


def loaded(folder, raw, *overrides, **options):
    notices: list[str] = []
    config = load_config(write(folder, raw), overrides, notice=notices.append, **options)
    return config, notices


def test_every_alias_names_a_key_that_exists_and_none_is_a_key_itself():
    for name, alias in ALIASES.items():
        path = tuple(alias.key.split("."))
        assert known(Config, path) or alias.key in _DERIVED, name
        assert not known(Config, (name,)), name
    assert not set(ALIASES) & set(LACKING)


@pytest.mark.parametrize(
    "spelling",
    ["max_seq_length", "model.data.train_ds.max_seq_length", "data.max_seq_length", "max-seq-length", "cutoff_len"],
)
def test_a_name_is_understood_wherever_it_stands(tmp_path, spelling):
    raw = example(tmp_path)
    del raw["data"]["sequence_length"]
    config, notices = loaded(tmp_path, put(raw, spelling, 32))
    assert config.data.sequence_length == 32
    assert notices == [f"`{spelling}` is read as `data.sequence_length: 32`."]


def test_values_are_translated(tmp_path):
    raw = example(tmp_path)
    raw |= {
        "bf16": False,
        "lr_scheduler_type": "constant_with_warmup",
        "optim": "adamw_torch_fused",
        "answer_only_loss": False,
        "query_pre_attn_scalar": 224,
        "window_size": [3, 0],
        "use_flash_attention": False,
        "output_dir": str(tmp_path / "out"),
        "save_total_limit": 5,
    }
    config, notices = loaded(tmp_path, raw)
    assert config.train.precision == "fp32"
    assert config.train.schedule.name == "constant"
    assert config.data.train_on == "all"
    assert config.model.attention_scale == pytest.approx(0.066815, abs=1e-6)
    assert config.model.sliding_window == 4, "the window of Megatron leaves the token itself out"
    assert config.attention.disable == ("flash", "flash_attn", "cudnn")
    assert config.log.dir == str(tmp_path / "out")
    assert config.checkpoint.keep == 5
    assert len(notices) == 9


def test_packing_by_other_names(tmp_path):
    raw = example(tmp_path)
    del raw["data"]["packing"]
    config, _ = loaded(tmp_path, raw | {"packed_sequence": True, "packed_sequence_size": 256})
    assert config.data.packing.pack_size == 256
    config, _ = loaded(tmp_path, raw | {"sample_packing": True})
    assert config.data.packing is not None
    config, _ = loaded(tmp_path, raw | {"sample_packing": False})
    assert config.data.packing is None


def test_spellings_that_disagree_are_refused_and_those_that_agree_are_not(tmp_path):
    with pytest.raises(ConfigError, match=r"`max_steps` 20 and `train.steps` 10 disagree"):
        loaded(tmp_path, example(tmp_path) | {"max_steps": 20})
    with pytest.raises(ConfigError, match="disagree"):
        raw = example(tmp_path)
        del raw["train"]["steps"]
        loaded(tmp_path, raw | {"max_steps": 20, "train_iters": 30})
    config, _ = loaded(tmp_path, example(tmp_path) | {"max_steps": 10})
    assert config.train.steps == 10


def test_a_value_without_a_meaning_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, example(tmp_path) | {"lr_scheduler_type": "polynomial", "window_size": [3, 3]})
    assert "`lr_scheduler_type` (read as `train.schedule.name`) must be `cosine`" in caught.value.faults[0]
    assert 'got "polynomial"' in caught.value.faults[0]
    assert "`window_size` (read as `model.sliding_window`) must be [left, 0]; got [3, 3]." in caught.value.faults[1]


def test_features_that_are_not_there_are_dropped_when_off_and_refused_when_on(tmp_path):
    off = {"tp_size": 1, "gradient_checkpointing": False, "recompute_granularity": None, "fp16": False}
    config, notices = loaded(tmp_path, example(tmp_path) | off)
    assert config == loaded(tmp_path, example(tmp_path))[0]
    assert len(notices) == 4
    assert notices[0] == "`tp_size: 1` is dropped: tensor parallelism stays off."
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, example(tmp_path) | {"model.tensor_model_parallel_size": 2, "num_moe_experts": 8})
    assert sorted(caught.value.faults) == [
        "`model.tensor_model_parallel_size` (tensor parallelism) is not available in this version of Freight; got 2; "
        "remove it.",
        "`num_moe_experts` (mixture of experts) is not available in this version of Freight; got 8; remove it.",
    ]


DEEPSPEED = {
    "ds_sequence_parallel_size": 4,
    "ds_sequence_parallel_fpdt": True,
    "ds_sequence_parallel_fpdt_chunk_size": 32,
    "ds_sequence_parallel_fpdt_offloading": True,
    "fpdt_FFN_chunk_size": 4,
}


def test_deepspeed_streams_in_our_words(tmp_path):
    config, notices = loaded(tmp_path, example(tmp_path) | DEEPSPEED)
    assert config.parallel.context == 4 and config.parallel.context_method == "ulysses"
    assert config.fpdt is not None and config.fpdt.offload == "host"
    assert (config.fpdt.chunk_tokens, config.fpdt.ffn_chunk_tokens) == (32, 16)
    assert notices == [
        "`ds_sequence_parallel_size` is read as `parallel.context: 4`.",
        "`ds_sequence_parallel_fpdt` is read as `fpdt: {}`.",
        "`ds_sequence_parallel_fpdt_chunk_size` is read as `fpdt.chunk_tokens: 32`.",
        '`ds_sequence_parallel_fpdt_offloading` is read as `fpdt.offload: "host"`.',
        "`fpdt_FFN_chunk_size` 4 tokens of a rank x `parallel.context` 4 = `fpdt.ffn_chunk_tokens: 16`.",
    ]


def test_deepspeeds_switch_off_takes_its_sizes_along(tmp_path):
    off = DEEPSPEED | {"ds_sequence_parallel_fpdt": False, "ds_sequence_parallel_size": 1}
    config, notices = loaded(tmp_path, example(tmp_path) | off)
    assert config == loaded(tmp_path, example(tmp_path))[0]
    assert notices[-1] == "`fpdt_FFN_chunk_size: 4` is dropped: ds_sequence_parallel_fpdt is false."


def test_ranks_and_memory_of_other_trainers(tmp_path):
    raw = example(tmp_path) | {
        "context_parallel_size": 2,
        "cp_comm_type": "p2p",
        "data_parallel_size": -1,
        "distributed_timeout_minutes": 30,
        "activations_checkpoint_granularity": "full",
        "activations_checkpoint_method": "uniform",
        "activations_checkpoint_num_layers": 1,
        "cpu_offloading": True,
    }
    config, _ = loaded(tmp_path, raw)
    assert (config.parallel.context, config.parallel.context_method) == (2, "ring")
    assert config.parallel.data_shard is None and config.parallel.timeout_seconds == 1800
    assert config.recompute is not None and config.offload.layer_inputs == "host"
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, example(tmp_path) | {"ds_sequence_parallel_size": 4, "parallel": {"context": 2}})
    assert caught.value.faults == (
        "`ds_sequence_parallel_size` 4 and `parallel.context` 2 disagree: they are two spellings of one key. Keep one.",
    )


def test_what_other_trainers_leave_empty_is_off(tmp_path):
    empty = dict.fromkeys(("cp_size", "dp_shard_size", "gradient_checkpointing", "cpu_offloading"))
    config, _ = loaded(tmp_path, example(tmp_path) | empty)
    plain, _ = loaded(tmp_path, example(tmp_path))
    for section in ("parallel", "recompute", "offload"):
        assert getattr(config, section) == getattr(plain, section)


def test_a_switch_beside_its_own_section_changes_nothing_there(tmp_path):
    section = {"granularity": "full", "method": "uniform"}
    config, _ = loaded(tmp_path, example(tmp_path) | {"gradient_checkpointing": True, "recompute": section})
    assert config.recompute is not None and config.recompute.model_fields_set == set(section)


@pytest.mark.parametrize(
    ("changes", "world", "rows", "tokens"),
    [
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}, 1, 16, 256),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}, 4, 64, 256),
        ({"gradient_accumulation_steps": 8}, 1, 8, None),
        ({"micro_batch_size": 2}, 1, 2, 256),
        ({"micro_batch_size": 2, "global_batch_size": 64}, 1, 64, 256),
    ],
)
def test_sizes_per_device_become_rows_and_tokens(tmp_path, changes, world, rows, tokens):
    raw = example(tmp_path)
    del raw["train"]["global_batch_size"]
    config, notices = loaded(tmp_path, raw | changes, world_size=world)
    assert config.train.global_batch_size == rows
    assert config.train.micro_batch_tokens == tokens
    assert f"= `train.micro_batch_tokens` {tokens or 128}" in notices[-1]


def test_the_arithmetic_of_the_batch_is_printed(tmp_path):
    raw = example(tmp_path)
    del raw["train"]["global_batch_size"]
    _, notices = loaded(tmp_path, raw | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8})
    assert notices == [
        "2 sequences x 128 tokens = `train.micro_batch_tokens` 256; 2 x 8 accumulation steps x 1 device = "
        "`train.global_batch_size` 16 rows."
    ]


def test_a_batch_that_disagrees_with_its_parts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"gives `train.global_batch_size` 16, but it is written as 4"):
        loaded(tmp_path, example(tmp_path) | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8})
    with pytest.raises(ConfigError, match=r"`per_device_train_batch_size` must be an integer of at least 1; got 0"):
        loaded(tmp_path, example(tmp_path) | {"per_device_train_batch_size": 0})


def test_unknown_names_are_not_guessed(tmp_path):
    with pytest.raises(ConfigError, match="`max_sequence_length` is not a key of Freight"):
        loaded(tmp_path, example(tmp_path) | {"max_sequence_length": 3})


def test_a_norm_that_freight_has_not_is_refused_and_not_taken_for_another(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, {**example(tmp_path), "normalization": "layernorm1p"}))
    (sentence,) = caught.value.faults
    assert "`normalization` (read as `model.norm`)" in sentence and 'got "layernorm1p"' in sentence


NEMO = """
trainer: {precision: bf16, max_steps: 100, gradient_clip_val: 1.0}
model:
  preset: debug
  micro_batch_size: 1
  global_batch_size: 16
  tensor_model_parallel_size: 1
  sequence_parallel: false
  answer_only_loss: true
  optim:
    name: distributed_fused_adam
    lr: 5.0e-6
    betas: [0.9, 0.98]
    sched: {name: CosineAnnealing, warmup_steps: 10, constant_steps: 0, min_lr: 5.0e-7}
  data:
    train_ds:
      file_names: [packed_4096_seed0.npy]
      packed_sequence: true
      packed_sequence_size: 4096
      max_seq_length: 4096
      global_batch_size: 16
      micro_batch_size: 1
      shuffle: true
      num_workers: 0
      concat_sampling_probabilities: [1.0]
    validation_ds:
      file_names: [packed_val_4096_seed0.npy]
      packed_sequence: true
      max_seq_length: 2048
      global_batch_size: 8
      micro_batch_size: 1
      shuffle: false
    test_ds: {file_names: [x.jsonl]}
"""


def test_a_packed_nemo_config_is_read_as_it_stands(tmp_path):
    path = tmp_path / "nemo.yaml"
    path.write_text(NEMO)
    with pytest.raises(ConfigError) as caught:
        load_config(path, check_files=False)
    (fault,) = caught.value.faults
    assert fault.startswith("`data.packing.npy_mask` is missing: packed_4096_seed0.npy does not say what its loss_mask")
    config = load_config(path, ["data.packing.npy_mask=label"], check_files=False)
    assert config.data.train == ("packed_4096_seed0.npy",)
    assert config.data.validation == ("packed_val_4096_seed0.npy",)
    assert (config.data.sequence_length, config.data.packing.pack_size) == (4096, 4096)
    assert (config.train.global_batch_size, config.train.micro_batch_tokens) == (16, 4096)
    assert (config.train.schedule.min_lr_ratio, config.train.schedule.warmup_steps) == (pytest.approx(0.1), 10)
    assert (config.data.shuffle, config.data.num_workers) == (True, 0)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["answer_only_loss=false"], "`data.train_on` has no effect: only packed rows are read"),
        (["model.optim.sched.min_lr=1"], "`min_lr` must lie between 0 and the learning rate 5e-06; got 1."),
        (["model.data.train_ds.concat_sampling_probabilities=[0.5, 0.5]"], "is not available"),
    ],
)
def test_what_a_packed_nemo_config_cannot_mean_is_refused(tmp_path, overrides, sentence):
    path = tmp_path / "nemo.yaml"
    path.write_text(NEMO)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_config(path, ["data.packing.npy_mask=label", *overrides], check_files=False)


def test_the_newer_spelling_names_the_packed_file_itself(tmp_path):
    raw = example(tmp_path)
    raw["data"] = {}
    put(raw, "packed_sequence_specs.packed_train_data_path", "x.npy")
    put(raw, "packed_sequence_specs.packed_sequence_size", 64)
    put(raw, "data.packing.npy_mask", "token")
    config = load_config(write(tmp_path, raw), check_files=False)
    assert (config.data.packing.file, config.data.train, config.data.sequence_length) == ("x.npy", None, None)


def test_what_megatron_writes_for_one_context_rank_is_dropped(tmp_path):
    off = {"cp_comm_type": "p2p", "context_parallel_size": 1, "distributed_timeout_minutes": None}
    config, notices = loaded(tmp_path, example(tmp_path) | off)
    assert config.parallel == loaded(tmp_path, example(tmp_path))[0].parallel
    assert "`cp_comm_type` is dropped: `parallel.context` is 1." in notices
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, example(tmp_path) | {"cp_comm_type": "p2p", "ds_sequence_parallel_size": 2})
    assert caught.value.faults == (
        '`cp_comm_type` gives `parallel.context_method` ring, but it is written as "ulysses". Keep one of the two.',
    )


def test_selective_recomputation_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, example(tmp_path) | {"recompute_granularity": "selective", "recompute_num_layers": 1})
    assert len(caught.value.faults) == 1
