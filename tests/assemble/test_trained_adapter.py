"""A trained adapter computes the same everywhere: in training, merged, exported, and through peft on transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from freight.assemble.build import architecture_for, build_for_inference, build_model, weights_for
from freight.assemble.stored_model import StoredModel, convert_model, open_stored_model
from freight.checkpoint import saved_state
from freight.checkpoint.frozen_weights import frozen_digests
from freight.checkpoint.hf_export import export_model
from freight.checkpoint.hf_import import read_architecture
from freight.config.load import config_from
from freight.config.schema import Config
from freight.errors import CheckpointError
from freight.nn.decoder import Decoder
from tests.checkpoint.tiny_transformers import build, float64_everywhere, logits_of, our_logits, reload


def run_config(base: Path | None, model: dict[str, Any] | None = None, **adapter: Any) -> Config:
    return config_from(
        {
            "model": ({"hf": str(base)} if base else {"preset": "debug", "vocab_size": 61}) | (model or {}),
            "data": {"train": "-", "tokenizer": "-", "sequence_length": 16},
            "train": {"steps": 1, "global_batch_size": 1, "optimizer": {"lr": 1e-3}, "precision": "fp32"},
            "adapter": {"rank": 3, "alpha": 5} | adapter,
        }
    )


@torch.no_grad()
def trained(config: Config, mesh: DeviceMesh) -> Decoder:
    """A model whose trained parameters are all random, as after some training."""
    arch = architecture_for(config)
    model = build_model(arch, config, mesh, weights=weights_for(config, arch))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            local = parameter.to_local()  # type: ignore[attr-defined]
            noise = torch.randn(local.shape, generator=generator) * 0.3
            local.copy_(local * (1 + noise) if "magnitude" in name else noise)
    return model.eval()


def save(model: Decoder, config: Config, folder: Path) -> Path:
    meta = {
        "architecture": model.arch.model_dump(mode="json"),
        "config": config.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "counters": {},
        "loader": {},
        "frozen": frozen_digests(model),
    }
    state = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    saved_state.save(folder, 1, {"model": state}, meta)
    return folder / "step-000001"


def in_float64(stored: StoredModel) -> Tensor:
    return our_logits(build_for_inference(stored.arch, stored.weights, dtype=torch.float64))


def through_peft(base: Path, adapter: Path) -> Tensor:
    with float64_everywhere():
        model = PeftModel.from_pretrained(reload(base), str(adapter)).double().eval()
    return logits_of(model)  # type: ignore[arg-type]


def base_folder(name: str, tmp_path: Path) -> Path:
    build(name).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("llama", {}),
        ("llama", {"use_rslora": True, "target_modules": ["q_proj", "mlp.down_proj"]}),
        ("llama", {"use_dora": True, "layers": [1]}),
        ("llama", {"modules_to_save": ["embed_tokens", "lm_head", "model.norm"], "target_modules": ".*[qv]_proj"}),
        ("llama tied", {"modules_to_save": ["lm_head"]}),
        ("llama biases", {"use_dora": True, "use_rslora": True}),
        ("qwen3", {"target_modules": ["self_attn.q_proj", "gate_proj"], "modules_to_save": ["q_norm"]}),
        ("gemma2", {"modules_to_save": ["embed_tokens"]}),
        ("gpt2", {}),
        ("gpt2", {"target_modules": ["c_attn"], "use_rslora": True}),
        ("gpt2", {"target_modules": ["q_proj", "v_proj", "mlp.c_proj"], "use_dora": True}),
        ("gpt2 untied", {"target_modules": ["c_proj"], "modules_to_save": ["lm_head", "wpe"]}),
        ("gpt_neox", {"target_modules": ["query_key_value", "dense"]}),
        ("gpt_neox serial", {"target_modules": ["k_proj", "dense_4h_to_h"], "use_dora": True, "use_rslora": True}),
    ],
)
def test_logits_are_equal_in_training_merged_and_through_peft(
    family: str, adapter: dict[str, Any], mesh: DeviceMesh, tmp_path: Path
) -> None:
    base = base_folder(family, tmp_path)
    config = run_config(base, **adapter)
    model = trained(config, mesh)
    stored = open_stored_model(save(model, config, tmp_path / "checkpoints"))
    merged = in_float64(stored)
    assert (merged - logits_of(reload(base))).abs().max() > 0.1  # an adapter that did nothing would prove nothing
    assert (our_logits(model) - merged).abs().max() < 2e-4 * merged.abs().max()

    assert stored.adapter is not None
    stored.adapter.write(tmp_path / "adapter", "fp64", None)
    assert (through_peft(base, tmp_path / "adapter") - merged).abs().max() < 1e-9
    export_model(stored.weights.load, stored.arch, tmp_path / "merged", dtype="fp64")
    assert (logits_of(reload(tmp_path / "merged")) - merged).abs().max() < 1e-9


def test_b_of_q_and_k_is_permuted_where_rotations_are_interleaved(mesh: DeviceMesh, tmp_path: Path) -> None:
    base = base_folder("llama", tmp_path)
    adapter = {"use_dora": True, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    config = run_config(base, {"rope": {"interleaved": True}}, **adapter)
    stored = open_stored_model(save(trained(config, mesh), config, tmp_path / "checkpoints"))
    assert stored.adapter is not None and stored.arch.rope.interleaved
    stored.adapter.write(tmp_path / "adapter", "fp64", None)
    assert (through_peft(base, tmp_path / "adapter") - in_float64(stored)).abs().max() < 1e-9


def test_the_folder_is_what_peft_writes(mesh: DeviceMesh, tmp_path: Path) -> None:
    base = base_folder("llama tied", tmp_path)
    config = run_config(base, target_modules=["q_proj", "layers.1.mlp.up_proj"], modules_to_save=["embed_tokens"])
    stored = open_stored_model(save(trained(config, mesh), config, tmp_path / "checkpoints"))
    assert stored.adapter is not None
    stored.adapter.write(tmp_path / "ours", "fp32", None)
    with float64_everywhere():
        model = PeftModel.from_pretrained(reload(base), str(tmp_path / "ours"))
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "theirs"))
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}
    assert "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight" in ours
    written = json.loads((tmp_path / "ours/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base)
    assert written["target_modules"] == ["q_proj", "model.layers.1.mlp.up_proj"]
    assert (written["peft_type"], written["task_type"], written["r"], written["lora_alpha"]) == (
        "LORA",
        "CAUSAL_LM",
        3,
        5,
    )


def test_a_grown_vocabulary_is_merged_or_refused_with_both_sizes(mesh: DeviceMesh, tmp_path: Path) -> None:
    base = base_folder("llama", tmp_path)
    config = run_config(base, {"vocab_size": 70}, modules_to_save=["embed_tokens"])
    model = trained(config, mesh)
    stored = open_stored_model(save(model, config, tmp_path / "checkpoints"))
    assert stored.adapter is not None
    with pytest.raises(CheckpointError, match=r"`model\.vocab_size` 70, but its base .* has 61.*--merge"):
        stored.adapter.write(tmp_path / "adapter", "fp32", None)
    merged = in_float64(stored)
    assert merged.shape[1] == 70
    assert (our_logits(model) - merged).abs().max() < 2e-4 * merged.abs().max()


def test_another_base_is_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    base = base_folder("llama", tmp_path)
    config = run_config(base, target_modules=["q_proj"])
    checkpoint = save(trained(config, mesh), config, tmp_path / "checkpoints")
    changed = build("llama")
    with torch.no_grad():
        changed.model.layers[0].self_attn.q_proj.weight *= 1.01
    changed.save_pretrained(base)
    stored = open_stored_model(checkpoint)
    assert torch.isfinite(stored.weights.load("layers.1.attention.q_proj.weight")).all()
    with pytest.raises(CheckpointError, match=r"layers\.0\.attention\.q_proj\.weight differs"):
        stored.weights.load("layers.0.attention.q_proj.weight")


def test_a_random_base_can_only_be_merged(mesh: DeviceMesh, tmp_path: Path) -> None:
    config = run_config(None)
    model = trained(config, mesh)
    stored = open_stored_model(save(model, config, tmp_path / "checkpoints"))
    merged = in_float64(stored)
    assert (our_logits(model) - merged).abs().max() < 2e-4 * merged.abs().max()
    assert stored.adapter is not None
    with pytest.raises(CheckpointError, match=r"base is random weights, which peft cannot load.*--merge"):
        stored.adapter.write(tmp_path / "adapter", "fp32", None)


def test_an_adapter_folder_is_no_model(mesh: DeviceMesh, tmp_path: Path) -> None:
    base = base_folder("llama", tmp_path)
    config = run_config(base, target_modules=["q_proj"])
    stored = open_stored_model(save(trained(config, mesh), config, tmp_path / "checkpoints"))
    assert stored.adapter is not None
    stored.adapter.write(tmp_path / "adapter", "fp32", None)
    for opened in (open_stored_model, read_architecture):
        with pytest.raises(CheckpointError, match=rf"adapter. is an adapter of {base}, not a model.*--merge"):
            opened(tmp_path / "adapter")


def test_merging_needs_an_adapter_and_spares_the_base(mesh: DeviceMesh, tmp_path: Path) -> None:
    base = base_folder("llama", tmp_path)
    with pytest.raises(CheckpointError, match="has no adapter, so --merge has nothing to merge"):
        convert_model(base, tmp_path / "out", merge=True)
    config = run_config(base)
    checkpoint = save(trained(config, mesh), config, tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="is the adapter's base"):
        convert_model(checkpoint, base, merge=True, force=True)
