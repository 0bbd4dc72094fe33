"""Presets and the merge of what the user wrote over them."""

from __future__ import annotations

import pytest

from freight.config.model import architecture_of
from freight.config.model_checks import architecture_faults
from freight.config.presets import preset, preset_names
from freight.config.schema import ModelSection
from freight.errors import ConfigError

# Published parameter counts, embeddings included and tied weights once.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "gpt2": 124_439_808,
    "pythia-70m": 70_426_624,
    "llama3.2-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "gemma2-2b": 2_614_341_888,
}


def parameters(arch) -> int:
    """Closed form, independent of the model's code."""
    hidden, dim = arch.hidden_size, arch.dims_per_head
    q, kv = arch.num_attention_heads * dim, arch.groups * dim
    qkv_bias = (q + 2 * kv) if arch.attention_bias else 0
    o_bias = hidden if arch.attention_bias is True else 0
    attention = hidden * (q + 2 * kv) + q * hidden + qkv_bias + o_bias + (2 * dim if arch.qk_norm == "head" else 0)
    mlp = (3 if arch.gated else 2) * hidden * arch.ffn_hidden_size
    mlp += (hidden + arch.ffn_hidden_size) if arch.mlp_bias else 0
    norm = hidden * (2 if arch.norm == "layernorm" else 1)
    norms = norm * (4 if arch.norm_placement == "sandwich" else 2)
    embeddings = arch.vocab_size * hidden * (1 if arch.tie_embeddings else 2)
    positions = arch.max_position_embeddings * hidden if arch.position_embedding == "learned" else 0
    return embeddings + positions + arch.num_layers * (attention + mlp + norms) + norm


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_sound(name):
    arch = preset(name)
    assert architecture_faults(arch) == []
    assert arch.family is not None


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(name, count):
    assert parameters(preset(name)) == count


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt3-125m", 0.125), ("gpt3-1.3b", 1.3), ("gpt3-13b", 13.0), ("gpt3-175b", 175.0)]
)
def test_gpt3_sizes_are_what_their_names_say(name, billions):
    assert parameters(preset(name)) / 1e9 == pytest.approx(billions, rel=0.02)


def test_gemma_alternates_windows_and_scales_its_embedding():
    arch = preset("gemma2-2b")
    assert [arch.window_of(layer) for layer in range(4)] == [4096, None, 4096, None]
    assert arch.embedding_scale == arch.hidden_size**0.5
    assert arch.scale == 256**-0.5
    big = preset("gemma2-27b")
    assert big.scale == pytest.approx((4608 / 32) ** -0.5)
    assert big.embedding_scale == pytest.approx(4608**0.5)


def test_what_the_user_wrote_wins_key_by_key():
    section = ModelSection(preset="llama3.2-1b", num_layers=2, rope={"theta": 1e4})
    arch = architecture_of(section)
    assert arch.num_layers == 2
    assert arch.hidden_size == 2048
    assert arch.rope.theta == 1e4
    assert arch.rope.scaling is not None
    assert arch.rope.scaling.factor == 32.0


def test_another_scaling_replaces_the_old_one_whole_and_null_removes_it():
    arch = architecture_of(ModelSection(preset="llama3.2-1b", rope={"scaling": {"type": "linear", "factor": 2.0}}))
    assert arch.rope.scaling is not None
    assert arch.rope.scaling.low_freq_factor is None
    assert arch.rope.theta == 500000
    assert architecture_faults(arch) == []
    assert architecture_of(ModelSection(preset="llama3.2-1b", rope={"scaling": None})).rope.scaling is None


def test_an_imported_base_is_overridden_by_null_only_where_null_is_written():
    base = preset("mistral-7b")
    assert architecture_of(ModelSection(hf="x"), base).sliding_window == 4096
    assert architecture_of(ModelSection(hf="x", sliding_window=None), base).sliding_window is None


def test_a_spelled_architecture_names_what_it_lacks():
    with pytest.raises(ConfigError) as caught:
        architecture_of(ModelSection(num_layers=2, hidden_size=64))
    assert sorted(caught.value.faults) == [
        "`model.ffn_hidden_size` is missing. Set it to an integer of at least 1.",
        "`model.num_attention_heads` is missing. Set it to an integer of at least 1.",
        "`model.vocab_size` is missing. Set it to an integer of at least 1.",
    ]
    with pytest.raises(ConfigError, match=r"`model.num_layers` must be an integer of at least 1; got null"):
        architecture_of(ModelSection(preset="debug", num_layers=None))
