"""Which modules a list, a regex and `all-linear` mean, and that no entry is passed over."""

from __future__ import annotations

from typing import Any

import pytest

from freight.config.adapter_targets import Module, choose_full, choose_lora
from freight.errors import ConfigError

EXPERTS = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(3) for expert in range(2)]
ATTENTION = [f"model.layers.1.self_attn.{name}" for name in ("q_proj", "k_proj")]
MODULES = [
    *(Module((name,)) for name in (*EXPERTS, *ATTENTION)),
    Module(("model.layers.1.self_attn.proj_drop",), linear=False),
    Module(("model.layers.1.mlp.router",), everywhere=False),
    Module(("head", "lm_head"), linear=False),
    Module(("embed_tokens", "model.embed_tokens"), linear=False),
]
Q_PROJ = "model.layers.1.self_attn.q_proj"


def lora(wanted: Any, layers: list[int] | None = None) -> list[str]:
    return choose_lora(MODULES, wanted, layers)


def test_a_text_must_match_whole_names() -> None:
    assert lora(r"(.*)\.(q_proj|proj)") == [Q_PROJ]
    assert lora(r".*proj.*") == [*EXPERTS, *ATTENTION]  # dropout is never wrapped
    with pytest.raises(ConfigError, match=r"\"q_proj\" matches no whole module name.*`\[q_proj\]`"):
        lora("q_proj")
    with pytest.raises(ConfigError, match=r"matches only model.layers.1.self_attn.proj_drop, which is no linear"):
        lora(r".*drop")
    with pytest.raises(ConfigError, match=r"is no regular expression"):
        lora("(q_proj")


def test_a_list_holds_names_or_their_ends_after_a_dot() -> None:
    assert lora(["q_proj"]) == lora([Q_PROJ]) == lora(["self_attn.q_proj"]) == [Q_PROJ]
    assert lora(["1.up_proj", "k_proj"]) == [*EXPERTS[1::2], ATTENTION[1]]
    with pytest.raises(ConfigError, match="no module is called proj"):
        lora(["proj"])
    with pytest.raises(ConfigError, match=r"is empty; got \[\]"):
        lora([])


def test_an_entry_without_a_match_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as raised:
        lora(["q_proj", "typo_proj", "kproj"])
    typo, near = raised.value.faults
    assert typo.startswith("`adapter.target_modules`: no module is called typo_proj.")
    assert near.startswith("`adapter.target_modules`: no module is called kproj. Did you mean `k_proj`? Known: ")


def test_layers_go_by_the_first_number() -> None:
    assert lora(["up_proj"], [1]) == EXPERTS[2:4]
    assert lora("all-linear", [0, 2]) == EXPERTS[:2] + EXPERTS[4:]
    with pytest.raises(ConfigError, match="names layer 3; the model has layers 0 to 2"):
        lora("all-linear", [0, 3])
    with pytest.raises(ConfigError, match="names layer -1"):
        lora("all-linear", [-1])
    with pytest.raises(ConfigError, match=r"`adapter.layers` \[0\] leaves no module"):
        lora(["q_proj"], [0])


def test_all_linear_is_without_head_and_router() -> None:
    assert lora("all-linear") == [*EXPERTS, *ATTENTION]
    assert lora(["router"]) == ["model.layers.1.mlp.router"]


def test_what_is_no_linear_layer_can_be_trained_in_full() -> None:
    with pytest.raises(ConfigError, match=r"lm_head cannot have A and B.*`adapter.modules_to_save: \[lm_head\]`"):
        lora(["lm_head"])
    assert choose_full(MODULES, ["lm_head", "embed_tokens"]) == ["head", "embed_tokens"]
    with pytest.raises(ConfigError, match=r"`adapter.modules_to_save`: no module is called embed_token\. Did you mean"):
        choose_full(MODULES, ["embed_token"])
