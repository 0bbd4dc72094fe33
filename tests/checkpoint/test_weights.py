"""Weights on disk: layouts, ties, growth of the vocabulary, and every way a folder can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from freight.checkpoint.hf_export import export_model
from freight.checkpoint.hf_import import open_weights, read_architecture
from freight.checkpoint.layouts import (
    BY_HEAD,
    CONV1D,
    FUSED_CONV1D,
    PLAIN,
    half_from_interleaved,
    interleaved_from_half,
)
from freight.checkpoint.weights import Weights
from freight.config.architecture import Architecture
from freight.errors import CheckpointError
from freight.ops.rope import RopeSpec, apply_rope, rotation
from tests.checkpoint.tiny_transformers import build, decoder_from, logits_of, our_logits


def opened(path: Path, arch: Architecture | None = None) -> Weights:
    weights = open_weights(path, arch or read_architecture(path))
    assert weights is not None
    return weights


def edit(path: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors of model.safetensors; `__` in a name is a dot."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    build("llama tied").save_pretrained(tmp_path)
    return tmp_path


class TestLayouts:
    @given(heads=st.integers(1, 4), head_dim=st.integers(1, 4), inputs=st.integers(1, 5), bias=st.booleans())
    @settings(max_examples=25)
    def test_split_undoes_join(self, heads: int, head_dim: int, inputs: int, bias: bool) -> None:
        shape = (heads * head_dim,) if bias else (heads * head_dim, inputs)
        parts = [torch.randn(shape) for _ in range(3)]
        for layout in (PLAIN, CONV1D, FUSED_CONV1D, BY_HEAD):
            held = parts if layout.fused else parts[:1]
            stored = layout.join(held, head_dim)
            assert tuple(stored.shape) == layout.shape([tuple(part.shape) for part in held])
            back = layout.split(stored, len(held), head_dim)
            assert all(torch.equal(a, b) for a, b in zip(back, held, strict=True))

    def test_by_head_is_q_k_v_of_each_head_in_turn(self) -> None:
        q, k, v = torch.tensor([1, 2, 3, 4]), torch.tensor([10, 20, 30, 40]), torch.tensor([11, 21, 31, 41])
        assert BY_HEAD.join([q, k, v], 2).tolist() == [1, 2, 10, 20, 11, 21, 3, 4, 30, 40, 31, 41]


class TestInterleavedAndHalf:
    def test_scores(self) -> None:
        q, k = torch.tensor([[1.0, 2, 3, 4]]).double(), torch.ones(1, 4).double()
        spec = RopeSpec.from_config(Architecture(**_SPEC).rope, 4, 64)

        def score(q: Tensor, k: Tensor, interleaved: bool) -> float:
            rotated = []
            for x, position in ((q, 3), (k, 1)):
                cos, sin = rotation(torch.tensor([position]), torch.tensor([4]), spec, torch.float64)
                rotated.append(apply_rope(x[None], cos, sin, interleaved))
            return float((rotated[0] * rotated[1]).sum())

        def permuted(x: Tensor) -> Tensor:
            return half_from_interleaved(x[0], 4, 4)[None]

        assert permuted(q)[0].tolist() == [1, 3, 2, 4]
        assert score(q, k, True) == pytest.approx(4.820863, abs=1e-6)
        assert score(permuted(q), permuted(k), False) == pytest.approx(4.820863, abs=1e-6)
        assert score(q, k, False) == pytest.approx(2.475621, abs=1e-6)

    @given(heads=st.integers(1, 3), half=st.integers(1, 4), rest=st.integers(0, 3))
    @settings(max_examples=25)
    def test_there_and_back(self, heads: int, half: int, rest: int) -> None:
        head_dim = 2 * half + rest
        tensor = torch.randn(heads * head_dim, 2)
        there = half_from_interleaved(tensor, head_dim, 2 * half)
        assert torch.equal(interleaved_from_half(there, head_dim, 2 * half), tensor)
        assert torch.equal(
            there.unflatten(0, (heads, -1))[:, 2 * half :], tensor.unflatten(0, (heads, -1))[:, 2 * half :]
        )

    @pytest.mark.parametrize("name", ["qwen3 bias and window", "gpt_neox"])
    def test_a_model_read_as_interleaved_computes_the_same(self, name: str, tmp_path: Path) -> None:
        # weights, biases and q/k norms of q and k are permuted, v and o are not; partial rotation too
        model = build(name)
        model.save_pretrained(tmp_path / "theirs")
        half = read_architecture(tmp_path / "theirs")
        arch = half.model_copy(update={"rope": half.rope.model_copy(update={"interleaved": True})})
        decoder = decoder_from(tmp_path / "theirs", arch)
        assert (our_logits(decoder) - logits_of(model)).abs().max() < 1e-9
        export_model(dict(decoder.named_parameters()), arch, tmp_path / "ours", dtype="fp64")
        before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
        assert all(torch.equal(before[key], after[key]) for key in before)


_SPEC = {
    "num_layers": 1,
    "hidden_size": 4,
    "ffn_hidden_size": 4,
    "num_attention_heads": 1,
    "vocab_size": 4,
    "rope": {"theta": 1e4},
}


class TestTies:
    def test_the_head_is_stored_once(self, tied: Path) -> None:
        assert "head.weight" not in opened(tied).names
        assert "lm_head.weight" not in load_file(tied / "model.safetensors")

    def test_both_keys_and_equal(self, tied: Path) -> None:
        embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
        edit(tied, lm_head__weight=embedding.clone())
        assert torch.equal(opened(tied).load("embed_tokens.weight"), embedding)

    def test_both_keys_and_different(self, tied: Path) -> None:
        edit(tied, lm_head__weight=torch.zeros(61, 32, dtype=torch.float64))
        with pytest.raises(CheckpointError, match=r"tied, yet `lm_head\.weight` and .* differ"):
            opened(tied)

    def test_untied_without_head(self, untied: Path) -> None:
        edit(untied, lm_head__weight=None)
        with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight \(1 missing\).*tie_word_embeddings"):
            opened(untied)


class TestVocabulary:
    def test_growth_keeps_old_rows_and_the_tie(self, tied: Path) -> None:
        arch = read_architecture(tied).model_copy(update={"vocab_size": 64})
        weights = opened(tied, arch)
        old = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
        grown = weights.load("embed_tokens.weight")
        assert grown.shape == (64, 32) and torch.equal(grown[:61], old) and grown.dtype == old.dtype
        assert torch.allclose(grown[61:], old.mean(0))
        assert "head.weight" not in weights.names
        export_model(weights.load, arch, tied / "grown", dtype="fp64")
        assert json.loads((tied / "grown/config.json").read_text())["vocab_size"] == 64
        assert load_file(tied / "grown/model.safetensors")["model.embed_tokens.weight"].shape == (64, 32)

    def test_growth_of_an_untied_head(self, untied: Path) -> None:
        weights = opened(untied, read_architecture(untied).model_copy(update={"vocab_size": 70}))
        assert weights.load("head.weight").shape == weights.load("embed_tokens.weight").shape == (70, 32)

    def test_rows_are_never_cut(self, tied: Path) -> None:
        with pytest.raises(CheckpointError, match=r"`model\.vocab_size` 60 is below the 61 rows"):
            opened(tied, read_architecture(tied).model_copy(update={"vocab_size": 60}))

    def test_config_and_rows_must_agree(self, tied: Path) -> None:
        config = json.loads((tied / "config.json").read_text())
        (tied / "config.json").write_text(json.dumps({**config, "vocab_size": 64}))
        with pytest.raises(CheckpointError, match=r"embed_tokens.weight is \[61, 32\], config.json says \[64, 32\]"):
            opened(tied)


class TestWrongFolders:
    def fault(self, path: Path) -> str:
        with pytest.raises(CheckpointError) as error:
            opened(path)
        assert "\n" not in str(error.value)
        return str(error.value)

    def test_missing_tensors_are_counted_and_some_named(self, untied: Path) -> None:
        edit(
            untied,
            model__norm__weight=None,
            **{f"model__layers__{i}__mlp__{n}_proj__weight": None for i in (0, 1) for n in ("up", "down")},
        )
        text = self.fault(untied)
        assert "(5 missing)" in text and "model.layers.0.mlp.down_proj.weight" in text and "and 2 more" in text

    def test_left_over_tensors(self, untied: Path) -> None:
        edit(untied, model__layers__0__self_attn__q_proj__bias=torch.zeros(32))
        assert "has model.layers.0.self_attn.q_proj.bias (1 left over)" in self.fault(untied)

    def test_buffers_of_old_files_are_not_left_over(self, untied: Path) -> None:
        edit(untied, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
        assert opened(untied).names

    def test_shapes(self, untied: Path) -> None:
        edit(untied, model__layers__1__mlp__up_proj__weight=torch.zeros(32, 48))
        assert "up_proj.weight is [32, 48], config.json says [48, 32] (1 of wrong shape)" in self.fault(untied)

    @pytest.mark.parametrize("length", [0, 4, 8, 100, -1, -1000])
    def test_cut_files(self, untied: Path, length: int) -> None:
        path = untied / "model.safetensors"
        path.write_bytes(path.read_bytes()[:length])
        assert "is not a whole safetensors file" in self.fault(untied)

    def test_a_header_of_garbage(self, untied: Path) -> None:
        path = untied / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[8:40] = b"\xff" * 32
        path.write_bytes(data)
        assert "is not a whole safetensors file" in self.fault(untied)

    def test_pickles_are_refused_with_the_conversion(self, untied: Path) -> None:
        (untied / "model.safetensors").rename(untied / "pytorch_model.bin")
        text = self.fault(untied)
        assert "is a pickle" in text and "from_pretrained" in text and "save_pretrained" in text

    def test_parts_without_index(self, untied: Path) -> None:
        (untied / "model.safetensors").rename(untied / "model-00001-of-00002.safetensors")
        assert "neither model.safetensors nor model.safetensors.index.json" in self.fault(untied)


class TestParts:
    @pytest.fixture
    def parts(self, untied: Path) -> Path:
        export_model(
            opened(untied).load, read_architecture(untied), untied / "parts", dtype="fp64", max_shard_bytes=20000
        )
        return untied / "parts"

    def test_equal_to_the_whole(self, parts: Path) -> None:
        whole, split = opened(parts.parent), opened(parts)
        assert whole.names == split.names
        assert all(torch.equal(whole.load(name), split.load(name)) for name in whole.names)
        index = json.loads((parts / "model.safetensors.index.json").read_text())
        files = sorted(path.name for path in parts.glob("*.safetensors"))
        assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        assert index["metadata"]["total_size"] == sum(
            tensor.nbytes for file in files for tensor in load_file(parts / file).values()
        )

    def test_a_missing_part(self, parts: Path) -> None:
        (parts / "model-00002-of-00005.safetensors").unlink(missing_ok=True)
        next(parts.glob("model-00003*")).unlink()
        with pytest.raises(CheckpointError, match="is missing, though"):
            opened(parts)

    def test_an_index_that_lies(self, parts: Path) -> None:
        path = parts / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.norm.weight"] = "model-" + index["weight_map"]["lm_head.weight"][6:]
        index["weight_map"]["model.embed_tokens.weight"] = index["weight_map"]["lm_head.weight"]
        path.write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"lacks model\.embed_tokens\.weight"):
            opened(parts)

    @pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
    def test_a_broken_index(self, parts: Path, content: str) -> None:
        (parts / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            opened(parts)

    def test_a_part_outside_the_folder_is_not_read(self, parts: Path) -> None:
        path = parts / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}))
        with pytest.raises(CheckpointError, match="is missing, though"):
            opened(parts)
