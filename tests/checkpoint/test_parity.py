"""Tiny models of every family: our logits equal transformers', and there and back is the identity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from freight.checkpoint.hf_config import config_for
from freight.checkpoint.hf_export import export_model
from freight.checkpoint.hf_import import read_architecture
from tests.checkpoint.tiny_transformers import MODELS, build, decoder_from, logits_of, our_logits, reload


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_and_round_trip(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "theirs")
    theirs = logits_of(model)

    arch = read_architecture(tmp_path / "theirs")
    decoder = decoder_from(tmp_path / "theirs")
    ours = our_logits(decoder)
    assert (ours - theirs).abs().max() < 1e-9
    assert theirs.std() > 0.1  # a model whose logits are all alike would prove nothing

    export_model(dict(decoder.named_parameters()), arch, tmp_path / "ours", dtype="fp64")
    assert (logits_of(reload(tmp_path / "ours")) - theirs).abs().max() < 1e-12
    before = load_file(tmp_path / "theirs/model.safetensors")
    after = load_file(tmp_path / "ours/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert config_for(read_architecture(tmp_path / "ours")) == config_for(arch)


@pytest.mark.parametrize("name", ["llama tied", "gpt2", "gpt_neox serial"])
def test_files_of_the_base_model_lack_the_prefix(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.base_model.save_pretrained(tmp_path)
    decoder = decoder_from(tmp_path)
    assert (our_logits(decoder) - logits_of(model)).abs().max() < 1e-9
