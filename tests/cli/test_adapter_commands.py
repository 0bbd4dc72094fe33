"""An adapter from the command line: check, train, evaluate, and both ways out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peft import AutoPeftModelForCausalLM

from freight.assemble.build import DrawnWeights
from freight.checkpoint.hf_export import export_model
from freight.config.architecture import Architecture
from freight.data.render.tokenizer import load_tokenizer
from tests.cli.test_commands import freight
from tests.cli.tiny_files import chats, config, tokenizer
from tests.nn.small_decoders import SMALL


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, a config and its finished run."""
    folder = tmp_path_factory.mktemp("adapted")
    arch = Architecture.model_validate(SMALL | dict(vocab_size=300, max_position_embeddings=256, init_std=0.2))
    words = load_tokenizer(tokenizer(folder))
    export_model(DrawnWeights(arch, 0).load, arch, folder / "base", dtype="fp32", tokenizer=words)
    adapter = {"rank": 2, "dropout": 0.1, "target_modules": ["q_proj", "down_proj"]}
    path = config(folder, adapter=adapter, train={"optimizer": {"lr": 0.1}})
    path.write_text(path.read_text().replace("preset: debug", f"hf: {folder / 'base'}"))
    for key in ("num_layers: 1", "hidden_size: 32", "ffn_hidden_size: 32"):
        path.write_text(path.read_text().replace(f"  {key}\n", ""))
    result = freight("train", path)
    assert result.exit_code == 0, result.output
    return folder


def test_check_says_what_is_trained_and_names_what_matches_nothing(adapted: Path) -> None:
    result = freight("check", adapted / "run.yaml")
    assert result.exit_code == 0, result.output
    assert "adapter: LoRA of rank 2, scale 16 (alpha / rank), on 4 linear modules: q_proj, down_proj" in result.stdout
    wrong = freight("check", adapted / "run.yaml", "adapter.target_modules=[q_porj]")
    assert wrong.exit_code == 2
    assert "no module is called q_porj. Did you mean `q_proj`?" in wrong.stderr


def test_a_run_is_evaluated_and_exported_both_ways(adapted: Path, tmp_path: Path) -> None:
    data = chats(tmp_path / "heldout.jsonl", 3)

    def loss(model: Path) -> float:
        return json.loads(freight("evaluate", model, "--data", data, "--json").stdout)["loss"]

    assert freight("export", adapted / "run", tmp_path / "merged", "--merge", "--dtype", "fp32").exit_code == 0
    assert loss(tmp_path / "merged") == pytest.approx(loss(adapted / "run"), abs=1e-6)
    assert abs(loss(adapted / "run") - loss(adapted / "base")) > 1e-3
    out = freight("export", adapted / "run", tmp_path / "adapter")
    assert out.exit_code == 0 and "peft.AutoPeftModelForCausalLM" in out.output
    assert AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").peft_config["default"].r == 2
    refused = freight("evaluate", tmp_path / "adapter", "--data", data)
    assert refused.exit_code != 0 and "is an adapter of" in refused.stderr
    twice = freight("export", tmp_path / "merged", tmp_path / "again", "--merge")
    assert twice.exit_code != 0 and "nothing to merge" in twice.stderr
