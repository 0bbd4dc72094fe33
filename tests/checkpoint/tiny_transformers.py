"""Tiny random transformers models, and their logits computed in float64 throughout.

transformers computes norms, softmax and rotary angles in float32 whatever the weights are, which hides differences
below 1e-6. Inside `float64_everywhere` every such cast goes to float64 instead; nothing else of its code changes.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from freight.checkpoint.families import FAMILIES
from freight.checkpoint.hf_import import open_weights, read_architecture
from freight.config.architecture import Architecture
from freight.nn.decoder import Decoder
from freight.nn.loss_head import LogitsHead
from freight.ops.batch import TokenBatch

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
GPT2_SIZES = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.3,
}

# Every family, and every variant that changes a config key or the set of stored tensors.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "llama tied": ("llama", {**GROUPED, "tie_word_embeddings": True}),
    "llama biases": ("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama one kv head": ("llama", {**SIZES, "num_key_value_heads": 1}),
    "llama head_dim": ("llama", {**GROUPED, "head_dim": 12}),
    "llama gelu": ("llama", {**GROUPED, "hidden_act": "gelu"}),
    "llama llama3 rope": ("llama", {**GROUPED, "rope_parameters": LLAMA3}),
    "llama yarn rope": ("llama", {**GROUPED, "rope_parameters": YARN}),
    "llama linear rope": (
        "llama",
        {**GROUPED, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}},
    ),
    "mistral": ("mistral", {**GROUPED, "sliding_window": None}),
    "mistral window": ("mistral", {**GROUPED, "sliding_window": 5}),
    "qwen2": ("qwen2", GROUPED),
    "qwen2 tied": ("qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2 window from layer 1": (
        "qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 16}),
    "qwen3 bias and window": (
        "qwen3",
        {
            **GROUPED,
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma2": ("gemma2", {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5}),
    "gemma2 without caps": (
        "gemma2",
        {
            **GROUPED,
            "head_dim": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gpt2": ("gpt2", GPT2_SIZES),
    "gpt2 untied": ("gpt2", {**GPT2_SIZES, "tie_word_embeddings": False, "n_inner": 40, "scale_attn_weights": False}),
    "gpt_neox": ("gpt_neox", SIZES),
    "gpt_neox serial": (
        "gpt_neox",
        {
            **SIZES,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
}
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """Turn transformers' float32 casts into float64 ones."""
    for family in FAMILIES:  # transformers imports its models lazily, and what is not imported is not patched
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with pytest.MonkeyPatch.context() as patch:
        proxy = _Float64Torch("torch")
        for name, module in list(sys.modules.items()):
            computes = re.fullmatch(r"transformers\.(.*modeling_.*|activations)", name)
            if computes and getattr(module, "torch", None) is torch:
                patch.setattr(module, "torch", proxy)
        patch.setattr(torch.Tensor, "float", lambda tensor: tensor.double())
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


class _Float64Torch(types.ModuleType):
    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def build(name: str) -> PreTrainedModel:
    """A model of `MODELS` in float64, with eager attention; norms and biases are random too."""
    family, keys = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **keys)
    with float64_everywhere():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if parameter_name.endswith("weight") else 0.0, 0.3)
    return model


def logits_of(model: PreTrainedModel, ids: list[int] = IDS) -> Tensor:
    """`[tokens, vocab]` of one document."""
    with float64_everywhere(), torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def reload(path: Any) -> PreTrainedModel:
    """An exported folder, loaded by transformers in float64."""
    # the buffers of rotary embeddings are computed while the model is built
    with float64_everywhere():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()


def decoder_from(path: Any, arch: Architecture | None = None, dtype: torch.dtype = torch.float64) -> Decoder:
    """Our decoder with the weights of a folder."""
    arch = arch or read_architecture(path)
    weights = open_weights(path, arch)
    assert weights is not None
    decoder = Decoder(arch).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(weights.load(name))
    return decoder


def our_logits(decoder: Decoder, ids: list[int] = IDS) -> Tensor:
    """`[tokens, vocab]` of one document."""
    with torch.no_grad():
        return decoder(TokenBatch.from_documents([ids]), LogitsHead(softcap=decoder.arch.final_softcap))
