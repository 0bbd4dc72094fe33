"""The exported folder: files, dtypes, tokenizer, what transformers makes of it, and that nothing is half-written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from freight.checkpoint.hf_export import export_model
from freight.config.architecture import Architecture
from freight.errors import CheckpointError
from freight.nn.decoder import Decoder
from freight.nn.init import init_weights
from tests.checkpoint.full_disk import largest_file
from tests.checkpoint.tiny_transformers import build, decoder_from, logits_of, reload

ARCH = Architecture(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=2,
    vocab_size=65,
    max_position_embeddings=32,
    norm_eps=1e-6,
)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def tensors_of(arch: Architecture = ARCH) -> dict[str, Tensor]:
    model = Decoder(arch)
    init_weights(model, 0)
    return dict(model.named_parameters())


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(60)} | {"</s>": 60, "<pad>": 61, "<unk>": 62}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    return fast


def test_files_and_what_they_say(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    export_model(
        tensors_of(),
        ARCH,
        tmp_path / "out",
        tokenizer=make_tokenizer(),
        generation_config={"temperature": 0.7, "do_sample": True},
        progress=lambda *call: calls.append(call),
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    }
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["vocab_size"], config["model_type"], config["tie_word_embeddings"]) == (65, "llama", True)
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == (60, 61, None)
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.temperature, generation.eos_token_id) == (0.7, 60)
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [65, 16]
        assert file.get_slice("model.embed_tokens.weight").get_dtype() == "BF16"
    assert calls[-1][:2] == (len(calls), len(calls)) and len(calls) == 20


def test_transformers_loads_model_tokenizer_and_template(tmp_path: Path) -> None:
    export_model(tensors_of(), ARCH, tmp_path / "out", tokenizer=make_tokenizer())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w3 w4")["input_ids"] == [3, 4]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w1"}], tokenize=False) == "<user>w1</s>"
    # the name by which transformers 4 knows the class
    config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize(("dtype", "stored"), [("fp16", "F16"), ("fp32", "F32"), ("bf16", "BF16")])
def test_dtype(dtype: str, stored: str, tmp_path: Path) -> None:
    tensors = tensors_of()
    export_model(tensors, ARCH, tmp_path / "out", dtype=dtype)
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {stored}  # noqa: SIM118
        norm = file.get_tensor("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(norm, tensors["layers.0.mlp.up_proj.weight"].to(norm.dtype))


def test_parts_load_with_equal_logits(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "theirs")
    decoder = decoder_from(tmp_path / "theirs")
    export_model(dict(decoder.named_parameters()), decoder.arch, tmp_path / "ours", dtype="fp64", max_shard_bytes=30000)
    assert len(list((tmp_path / "ours").glob("model-*"))) > 1
    assert torch.equal(logits_of(reload(tmp_path / "ours")), logits_of(model))


class TestTakenFolders:
    def test_a_model_is_replaced_only_by_force(self, tmp_path: Path) -> None:
        out = export_model(tensors_of(), ARCH, tmp_path / "out")
        before = (out / "model.safetensors").read_bytes()
        with pytest.raises(CheckpointError, match=r"already holds a model. .* `--force`"):
            export_model(tensors_of(), ARCH, out, dtype="fp32")
        assert (out / "model.safetensors").read_bytes() == before
        export_model(tensors_of(), ARCH, out, dtype="fp32", force=True)
        assert len((out / "model.safetensors").read_bytes()) > len(before)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_anything_else_is_never_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(CheckpointError, match="not an exported model"):
            export_model(tensors_of(), ARCH, tmp_path, force=True)
        assert (tmp_path / "thesis.tex").exists()

    def test_an_empty_folder_is_free(self, tmp_path: Path) -> None:
        assert (export_model(tensors_of(), ARCH, tmp_path) / "config.json").exists()


class TestNothingHalfWritten:
    def attempt(self, tmp_path: Path, tensors: Any, **options: Any) -> str:
        with pytest.raises(CheckpointError) as error:
            export_model(tensors, ARCH, tmp_path / "out", **options)
        assert not list(tmp_path.iterdir())
        assert "\n" not in str(error.value)
        return str(error.value)

    def test_a_missing_tensor(self, tmp_path: Path) -> None:
        tensors = tensors_of()
        del tensors["norm.weight"]
        assert "nothing to export for `norm.weight` (1 missing)" in self.attempt(tmp_path, tensors)

    def test_padded_rows(self, tmp_path: Path) -> None:
        tensors = {**tensors_of(), "embed_tokens.weight": torch.zeros(80, 16)}
        assert "`embed_tokens.weight` is [80, 16]; the architecture says [65, 16]" in self.attempt(tmp_path, tensors)

    def test_a_full_disk(self, tmp_path: Path) -> None:
        with largest_file(2000):
            assert "cannot be written: " in self.attempt(tmp_path, tensors_of())

    def test_an_unknown_dtype(self, tmp_path: Path) -> None:
        assert "`dtype` must be one of bf16" in self.attempt(tmp_path, tensors_of(), dtype="int4")

    def test_an_interrupt(self, tmp_path: Path) -> None:
        def interrupted(name: str) -> Tensor:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export_model(interrupted, ARCH, tmp_path / "out")
        assert not list(tmp_path.iterdir())
