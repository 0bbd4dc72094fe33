"""The plan: sizes by arithmetic, steps from data, kernels, groups, and the words that say so."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.config.load import config_from, load_config
from freight.config.model import architecture_of
from freight.config.schema import Config
from freight.errors import ConfigError
from freight.nn.decoder import Decoder
from freight.ops.attention_backends import Hardware
from freight.planner.plan import DataFacts
from freight.planner.resolve import resolve
from freight.planner.words import count, plan_words
from tests.config.example import example, put, write

FACTS = DataFacts(num_documents=640, num_rows=84, num_tokens=10_000, max_length=60)


def config_of(**changes) -> Config:
    raw = {
        "model": {"preset": "debug"},
        "data": {"train": "x", "tokenizer": "t", "sequence_length": 64, "packing": {"pack_size": 128}},
        "train": {"steps": 10, "global_batch_size": 6, "optimizer": {"lr": 1e-3}},
    }
    for key, value in changes.items():
        put(raw, key.replace("__", "."), value)
    return config_from(raw)


def plan_of(*, data=None, world_size=1, hardware=Hardware("cpu"), **changes):  # noqa: B008
    config = config_of(**changes)
    return resolve(config, architecture_of(config.model), data=data, world_size=world_size, hardware=hardware)


def test_rows_microbatches_and_tokens_follow_by_arithmetic():
    plan = plan_of(train__micro_batch_tokens=512)
    assert (plan.pack_size, plan.rows_per_microbatch, plan.rows_per_step) == (128, 4, 6)
    assert plan.microbatches_per_step == 2
    assert plan.filler_rows == 2
    assert plan.tokens_per_step == 768
    assert (
        "step: 6 rows x 128 tokens = 768 tokens; 2 microbatches x 4 rows = 8 rows, 2 of them filler without labels; "
        "a microbatch is 512 tokens"
    ) in plan_words(plan)


def test_defaults_are_one_row_per_microbatch_and_one_document_per_row_without_packing():
    assert plan_of().micro_batch_tokens == 128
    plan = plan_of(data__packing=None, train__global_batch_size=None, train__global_batch_documents=3)
    assert (plan.pack_size, plan.micro_batch_tokens, plan.rows_per_step) == (64, 64, 3)


@settings(max_examples=200)
@given(
    rows=st.integers(1, 500), per_microbatch=st.integers(1, 16), world=st.integers(1, 8), pack_size=st.integers(64, 256)
)
def test_a_step_holds_every_row_and_less_than_one_round_of_fillers(rows, per_microbatch, world, pack_size):
    plan = plan_of(
        world_size=world,
        train__global_batch_size=rows,
        data__packing={"pack_size": pack_size},
        train__micro_batch_tokens=per_microbatch * pack_size,
    )
    slots = plan.microbatches_per_step * plan.rows_per_microbatch * world
    assert slots == rows + plan.filler_rows
    assert 0 <= plan.filler_rows < per_microbatch * world
    assert plan.tokens_per_step == rows * pack_size


def test_documents_per_step_become_rows_once_the_data_is_known():
    changes = {"train__global_batch_size": None, "train__global_batch_documents": 128}
    unknown = plan_of(**changes)
    assert unknown.rows_per_step is unknown.tokens_per_step is unknown.microbatches_per_step is None
    assert any("rows follow once the data is packed" in line for line in plan_words(unknown))
    plan = plan_of(data=FACTS, **changes)
    assert plan.rows_per_step == max(1, round(128 / (640 / 84))) == 17
    assert any("global batch 128 documents / n 7.62 = 16.8 -> 17 rows = 129.5 documents" in w for w in plan_words(plan))


def test_tokens_per_step_are_used_directly():
    assert plan_of(train__global_batch_size=None, train__global_batch_tokens=1280).rows_per_step == 10


@pytest.mark.parametrize(
    ("epochs", "drop_last", "steps"),
    [(1, False, 14), (2, False, 28), (0.5, False, 7), (1.25, False, 18), (3, True, 42), (1.25, True, 17)],
)
def test_epochs_become_steps(epochs, drop_last, steps):
    plan = plan_of(data=FACTS, train__steps=None, train__epochs=epochs, data__drop_last=drop_last)
    assert plan.total_steps == steps
    assert plan.steps_per_epoch == 14


def test_an_epoch_with_a_tail_has_one_step_more():
    plan = plan_of(data=FACTS._replace(num_rows=85), train__steps=None, train__epochs=1)
    assert plan.total_steps == math.ceil(85 / 6) == 15
    assert plan_of(train__steps=None, train__epochs=1).total_steps is None


def test_a_warmup_longer_than_the_epochs_is_refused_once_that_is_known():
    changes = {"train__steps": None, "train__epochs": 1, "train__schedule": {"warmup_steps": 15}}
    plan_of(**changes)
    with pytest.raises(ConfigError, match=r"`train.schedule.warmup_steps` 15 must be at most the run's 14 steps"):
        plan_of(data=FACTS, **changes)


def test_no_step_at_all_is_refused():
    """Fewer samples than a batch with `drop_last`: an error `0 steps`."""
    with pytest.raises(ConfigError, match=r"0 steps per epoch: 3 rows, global batch 4"):
        plan_of(data=DataFacts(3, 3, 90, 30), train__global_batch_size=4, data__drop_last=True)


def test_a_packed_file_decides_the_row():
    plan = plan_of(data=FACTS._replace(pack_size=256), data__packing={"file": "F"})
    assert (plan.pack_size, plan.micro_batch_tokens) == (256, 256)
    with pytest.raises(ConfigError, match=r"packed file's pack_size 256; got 384. Use 256 or 512."):
        plan_of(data=FACTS._replace(pack_size=256), data__packing={"file": "F"}, train__micro_batch_tokens=384)


@pytest.mark.parametrize("preset", ["debug", "gpt2", "qwen2-0.5b"])
def test_decay_groups_are_those_of_the_real_model(preset):
    plan = plan_of(model={"preset": preset, "num_layers": 2})
    parameters = list(Decoder(plan.arch).parameters()) if preset == "debug" else None
    total = plan.decaying.parameters + plan.not_decaying.parameters
    assert plan.decaying.tensors > 0
    assert plan.not_decaying.tensors > 0
    if parameters is not None:
        assert total == sum(p.numel() for p in parameters)
        assert plan.decaying.tensors == sum(p.ndim >= 2 for p in parameters)


@pytest.mark.parametrize(
    ("hardware", "line"),
    [
        (Hardware("cpu"), "attention: cpu_flash forward, math backward (bf16, head_dim 16, cpu)"),
        (
            Hardware("cuda", 90),
            "attention: cudnn forward and backward (bf16, head_dim 16, cuda sm90); flash for packed rows",
        ),
        (Hardware("cuda", 75), "attention: efficient forward and backward (bf16, head_dim 16, cuda sm75)"),
    ],
)
def test_the_kernel_is_named_for_any_device(hardware, line):
    assert any(words.startswith(line) for words in plan_words(plan_of(hardware=hardware)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attention__backend": "cudnn"}, "`attention.backend: cudnn` cannot run on cpu"),
        (
            {"attention__backend": "cpu_flash", "model__attention_softcap": 50.0},
            "`attention.backend: cpu_flash` cannot run `model.attention_softcap` 50",
        ),
        ({"attention__disable": ["math", "cpu_flash"]}, "`attention.disable`"),
    ],
)
def test_a_kernel_that_cannot_is_refused_before_anything_runs(changes, sentence):
    """Options that do nothing, and a chosen backend without softcap: refused, never an uncapped run."""
    with pytest.raises(ConfigError) as caught:
        plan_of(**changes)
    assert any(sentence in fault for fault in caught.value.faults), caught.value.faults


def test_all_faults_of_config_and_architecture_come_together():
    config = config_of()
    arch = architecture_of(config.model).model_copy(update={"max_position_embeddings": 32, "num_query_groups": 3})
    with pytest.raises(ConfigError) as caught:
        resolve(config, arch)
    assert len(caught.value.faults) == 2


def test_what_changes_the_results_is_listed():
    assert plan_words(plan_of())[-1] == "changes the results beyond rounding: nothing"
    changed = plan_of(train__label_smoothing=0.1, data__truncation="cut_right", model__attention_dropout=0.1)
    words = plan_words(changed)[-1]
    assert words.endswith("attention dropout 0.1, label smoothing 0.1, longer documents lose their end")


def test_numbers_for_people():
    assert [count(n) for n in (12, 1_500, 134_515_008, 175e9)] == ["12", "1.5K", "134.5M", "175.0B"]


def test_a_loaded_file_resolves(tmp_path: Path):
    config = load_config(write(tmp_path, example(tmp_path)))
    assert len(plan_words(resolve(config, architecture_of(config.model)))) == 9
