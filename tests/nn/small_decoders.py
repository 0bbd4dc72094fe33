"""Tiny decoders in float64, one for every architectural switch."""

from __future__ import annotations

from typing import Any

import torch

from freight.config.architecture import Architecture
from freight.nn.decoder import Decoder
from freight.nn.init import init_weights

SMALL = dict(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    vocab_size=31,
    max_position_embeddings=16,
    init_std=0.3,
)


def build(**changes: Any) -> tuple[Decoder, Architecture]:
    arch = Architecture.model_validate(SMALL | changes)
    model = Decoder(arch).double()
    init_weights(model, 3)
    with torch.no_grad():  # biases and norms away from their neutral values, or their gradients prove little
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.add_(0.2 * noise)
    return model, arch


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": dict(num_query_groups=2),
    "multi-query": dict(num_query_groups=1),
    "untied": dict(tie_embeddings=False),
    "head_dim is not hidden / heads": dict(hidden_size=12, num_attention_heads=2, num_query_groups=1, head_dim=8),
    "gpt2": dict(
        norm="layernorm", activation="gelu_tanh", attention_bias=True, mlp_bias=True, position_embedding="learned"
    ),
    "neox": dict(
        norm="layernorm",
        activation="gelu",
        attention_bias=True,
        mlp_bias=True,
        parallel_residual=True,
        head_dim=8,
        rope=dict(percent=0.25),
        tie_embeddings=False,
    ),
    "gemma2": dict(
        norm_placement="sandwich",
        norm_offset=True,
        activation="geglu_tanh",
        embedding_scale=4.0,
        attention_softcap=2.0,
        final_softcap=3.0,
        attention_scale=0.3,
        sliding_window=2,
        layer_types=("sliding_attention", "full_attention"),
    ),
    "qwen2": dict(attention_bias="qkv", num_query_groups=2, sliding_window=3),
    "qwen3": dict(qk_norm="head", num_query_groups=2, head_dim=8),
    "olmo2": dict(qk_norm="projection", num_query_groups=2, norm_placement="sandwich"),
    "olmoe": dict(qk_norm="projection", clip_qkv=0.5),
    "parallel and sandwiched": dict(parallel_residual=True, norm_placement="sandwich"),
    "layernorm with offset": dict(norm="layernorm", norm_offset=True),
    "interleaved rope": dict(rope=dict(interleaved=True, percent=0.5), head_dim=8),
    "two ropes": dict(
        rope=dict(scaling=dict(type="linear", factor=4)),
        rope_sliding=dict(theta=100.0),
        sliding_window=2,
        layer_types=("sliding_attention", "full_attention"),
    ),
    "dynamic rope": dict(rope=dict(scaling=dict(type="dynamic", factor=2.0)), max_position_embeddings=4, head_dim=8),
    "geglu": dict(activation="geglu"),
    "relu2": dict(activation="relu2"),
}
