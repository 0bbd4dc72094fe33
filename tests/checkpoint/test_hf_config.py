"""config.json: the tables against transformers' own defaults, rotary spellings, windows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from freight.checkpoint.families import FAMILIES
from freight.checkpoint.hf_config import architecture_from, config_for
from freight.checkpoint.hf_import import open_weights, read_architecture
from freight.config.architecture import Architecture, RopeConfig
from freight.errors import CheckpointError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}
PLAIN = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "norm_eps": 1e-6,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    family, theirs = FAMILIES[name], AutoConfig.for_model(name).to_dict()
    for field, key in family.keys.items():
        if key.default is not None or not (key.required or field in ("head_dim", "num_query_groups")):
            assert theirs[key.name] == key.default, field
    assert theirs[family.activation_key.name] == family.activation_key.default
    if family.rotary:
        assert theirs["rope_parameters"]["rope_theta"] == 1e4
        assert theirs["rope_parameters"].get("partial_rotary_factor", 1.0) == family.rotary[2]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_default_config_survives_there_and_back(name: str) -> None:
    theirs = AutoConfig.for_model(name)
    arch = architecture_from(theirs.to_dict())
    back = AutoConfig.for_model(**config_for(arch)).to_dict()
    # no dropout on hidden states here; gpt2's n_inner is written out; older readers take max_window_layers
    free = {"architectures", "resid_pdrop", "embd_pdrop", "n_inner", "max_window_layers", "head_dim", "rope_theta"}
    assert {k: v for k, v in back.items() if k not in free} == {
        k: v for k, v in theirs.to_dict().items() if k not in free
    }


class TestWhereThetaIsWritten:
    def read(self, base: dict[str, Any] = LLAMA, **keys: Any) -> Architecture:
        return architecture_from({**base, **keys})

    def test_in_rope_parameters(self) -> None:
        assert self.read(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope.theta == 5e5

    def test_outside_beside_an_empty_scaling(self) -> None:
        rope = self.read(rope_theta=1000000, rope_scaling=None).rope
        assert (rope.theta, rope.scaling) == (1e6, None)

    def test_in_both_and_different(self) -> None:
        with pytest.raises(CheckpointError, match=r"`rope_theta` twice: 500000.0 .* 10000.0 outside"):
            self.read(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 5e5})

    def test_in_both_and_equal(self) -> None:
        assert self.read(rope_theta=5e5, rope_parameters={"rope_theta": "5e5"}).rope.theta == 5e5

    def test_scaling_in_both_and_different(self) -> None:
        linear, other = ({"rope_type": "linear", "factor": factor} for factor in (2.0, 4.0))
        with pytest.raises(CheckpointError, match="disagree"):
            self.read(rope_parameters=linear, rope_scaling=other)

    def test_per_layer_type(self) -> None:
        arch = self.read(
            {**QWEN2, "use_sliding_window": True, "sliding_window": 4},
            layer_types=["full_attention", "sliding_attention"],
            rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        )
        assert [arch.rope_of(layer).theta for layer in (0, 1)] == [1e6, 1e4]

    def test_nowhere(self) -> None:
        assert self.read().rope == RopeConfig()

    def test_as_text(self) -> None:
        theta = self.read(rope_theta="1e6").rope.theta
        assert theta == 1e6 and isinstance(theta, float)

    def test_old_spelling_of_scaling(self) -> None:
        scaling = self.read(rope_scaling={"type": "linear", "factor": 8}).rope.scaling
        assert scaling is not None and (scaling.type, scaling.factor) == ("linear", 8.0)

    def test_length_before_stretching_outside_wins(self) -> None:
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        scaling = self.read(rope_scaling=yarn, original_max_position_embeddings=32).rope.scaling
        assert scaling is not None and scaling.original_max_position_embeddings == 32

    @pytest.mark.parametrize("kind", ["mrope", "axial", "Yarn"])
    def test_unknown_kinds(self, kind: str) -> None:
        with pytest.raises(CheckpointError, match=f"unknown rope type '{kind}'"):
            self.read(rope_scaling={"rope_type": kind, "factor": 2.0})

    def test_missing_and_unknown_keys(self) -> None:
        with pytest.raises(CheckpointError, match="missing low_freq_factor, high_freq_factor"):
            self.read(rope_scaling={"rope_type": "llama3", "factor": 8.0})
        with pytest.raises(CheckpointError, match="unknown mrope_section"):
            self.read(rope_scaling={"rope_type": "linear", "factor": 8.0, "mrope_section": [1]})

    @pytest.mark.parametrize(
        "scaling",
        [
            None,
            {"type": "linear", "factor": 8.0},
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16.0},
        ],
    )
    def test_export_is_read_by_both_generations(self, scaling: dict[str, Any] | None) -> None:
        arch = Architecture.model_validate({**PLAIN, "rope": {"theta": 5e5, "scaling": scaling}})
        written = config_for(arch)
        old = {key: value for key, value in written.items() if key != "rope_parameters"}
        new = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
        ropes = [architecture_from(config).rope for config in (written, old, new)]
        assert ropes[0] == ropes[1] == ropes[2]
        assert ropes[0].theta == 5e5
        theirs = AutoConfig.for_model(**written).rope_parameters
        assert (theirs["rope_theta"], theirs["rope_type"]) == (5e5, scaling["type"] if scaling else "default")


class TestWindows:
    def test_zero_and_switched_off_mean_none(self) -> None:
        mistral = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2}
        assert architecture_from({**mistral, "sliding_window": 0}).sliding_window is None
        assert architecture_from({**mistral, "sliding_window": None}).sliding_window is None
        assert architecture_from(mistral).sliding_window == 4096
        switched_off = {**QWEN2, "sliding_window": 9, "use_sliding_window": False, "max_window_layers": 0}
        assert architecture_from(switched_off).sliding_window is None

    def test_llama_has_none(self) -> None:
        assert architecture_from({**LLAMA, "sliding_window": 9}).sliding_window is None

    @pytest.mark.parametrize(
        ("family", "keys"), [("gemma2", {}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 3})]
    )
    def test_files_from_before_layer_types(self, family: str, keys: dict[str, Any]) -> None:
        theirs = AutoConfig.for_model(family, num_hidden_layers=5, **keys).to_dict()
        written = theirs.pop("layer_types")
        assert architecture_from({**theirs, **keys}).layer_types == tuple(written)

    def test_layer_types_must_fit(self) -> None:
        with pytest.raises(CheckpointError, match="3 entries for 2 layers"):
            architecture_from({**QWEN2, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3})


def test_query_scale_of_gemma2() -> None:
    arch = architecture_from({**LLAMA, "model_type": "gemma2", "head_dim": 256, "query_pre_attn_scalar": 224})
    assert arch.scale == pytest.approx(0.066815, abs=1e-6)
    assert config_for(arch)["query_pre_attn_scalar"] == 224


def test_head_dim_that_is_not_hidden_by_heads() -> None:
    config = {**LLAMA, "hidden_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    arch = architecture_from({**config, "head_dim": 8})
    assert arch.scale == pytest.approx(0.353553, abs=1e-6)
    assert config_for(arch)["head_dim"] == 8
    assert architecture_from({**config, "head_dim": None}).dims_per_head == 6


class TestChoiceOfFamily:
    @pytest.mark.parametrize(
        ("changes", "family"),
        [
            ({}, "llama"),
            ({"sliding_window": 8}, "mistral"),
            ({"attention_bias": "qkv"}, "qwen2"),
            ({"qk_norm": "head"}, "qwen3"),
            ({"sliding_window": 8, "layer_types": ("full_attention", "sliding_attention"), "qk_norm": "head"}, "qwen3"),
        ],
    )
    def test_first_that_fits(self, changes: dict[str, Any], family: str) -> None:
        assert config_for(Architecture(**PLAIN, **changes))["model_type"] == family

    def test_none_fits_and_says_why(self) -> None:
        with pytest.raises(CheckpointError, match=r"no Hugging Face family .* `activation: relu2`"):
            config_for(Architecture(**PLAIN, activation="relu2"))

    def test_the_given_family_does_not_fit(self) -> None:
        with pytest.raises(CheckpointError, match="family llama cannot express `qk_norm: head`"):
            config_for(Architecture(**PLAIN, family="llama", qk_norm="head"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no `model_type`"),
        ({**LLAMA, "model_type": "lama"}, "'lama' is not supported. .* Did you mean llama?"),
        ({**LLAMA, "model_type": "mamba2"}, "Known: llama, mistral"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "no `hidden_size`"),
        ({**LLAMA, "num_hidden_layers": "many"}, "`num_hidden_layers`: .* got 'many'"),
        ({**LLAMA, "vocab_size": 0}, "`vocab_size`: .* got 0"),
        ({**LLAMA, "hidden_act": "tanhshrink"}, "`hidden_act` 'tanhshrink' is not supported"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "cannot be trained"),
        ({**LLAMA, "rope_scaling": "yarn"}, "`rope_scaling` must be a mapping"),
        ({**LLAMA, "rope_theta": "big"}, "`rope_theta` must be a number; got 'big'"),
        ({**LLAMA, "rope_theta": -1}, "theta"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "llama rotates whole heads"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
        ({**GPT2, "n_embd": "x"}, "n_embd"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads"),
        ({**LLAMA, "num_attention_heads": 5}, "num_attention_heads"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_query_groups|num_key_value_heads"),
    ],
)
def test_bad_configs_are_one_line(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as error:
        read_architecture(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_files_that_are_not_configs(tmp_path: Path) -> None:
    def fault(path: Path | str) -> str:
        with pytest.raises(CheckpointError) as error:
            read_architecture(path)
        return str(error.value)

    assert "has no config.json" in fault(tmp_path)
    assert "does not exist" in fault(tmp_path / "nowhere")
    assert "hf download org/model" in fault("org/model")
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in fault(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "JSON object; got list" in fault(tmp_path)
    (tmp_path / "model.bin").write_text("")
    assert "neither a folder" in fault(tmp_path / "model.bin")


def test_a_bare_config_stands_for_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for path in (tmp_path, tmp_path / "config.json"):
        assert open_weights(path, read_architecture(path)) is None
