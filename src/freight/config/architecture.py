"""What a decoder is: every number that decides shapes and arithmetic, and nothing about how it is trained.

`Architecture` is complete and checked; `ModelSection` (schema.py) is what a user writes, where any key may be missing
because `model.hf` or `model.preset` supplies it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from freight.config.base import Section

Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu2"]
LayerType = Literal["full_attention", "sliding_attention"]
RopeScalingType = Literal["linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox"]


class RopeScaling(Section):
    """How rotary frequencies are stretched beyond the length a model was pretrained at."""

    type: RopeScalingType = Field(description="The method.")
    factor: float | None = Field(default=None, description="How far positions are stretched.")
    original_max_position_embeddings: int | None = Field(
        default=None, description="Positions of pretraining; null = max_position_embeddings."
    )
    low_freq_factor: float | None = Field(default=None, description="llama3: below it, frequencies are divided.")
    high_freq_factor: float | None = Field(default=None, description="llama3: above it, frequencies are kept.")
    attention_factor: float | None = Field(default=None, description="yarn, longrope: factor on cos and sin.")
    beta_fast: float = Field(default=32.0, description="yarn: rotations above which a dim is kept.")
    beta_slow: float = Field(default=1.0, description="yarn: rotations below which a dim is stretched.")
    mscale: float | None = Field(default=None, description="yarn: magnitude scale.")
    mscale_all_dim: float | None = Field(default=None, description="yarn: magnitude scale it is divided by.")
    truncate: bool = Field(default=True, description="yarn: round the corrected range to whole dims.")
    short_factor: tuple[float, ...] | None = Field(default=None, description="longrope: per pair, short documents.")
    long_factor: tuple[float, ...] | None = Field(default=None, description="longrope: per pair, long documents.")


class RopeConfig(Section):
    """Rotary position embedding."""

    theta: float = Field(default=10000.0, gt=0, description="Base of the frequencies.")
    percent: float = Field(default=1.0, gt=0, le=1, description="Share of head_dim that rotates.")
    interleaved: bool = Field(default=False, description="Pair dims (2i, 2i+1) instead of (i, i + rot/2).")
    scaling: RopeScaling | None = Field(default=None, description="null = none.")


class Architecture(Section):
    """Every number that decides a decoder's shapes and arithmetic."""

    family: Family | None = Field(
        default=None, description="Hugging Face family that `freight export` writes; null = chosen."
    )
    num_layers: int = Field(ge=1, description="Blocks.")
    hidden_size: int = Field(ge=1, description="Width of the residual stream.")
    ffn_hidden_size: int = Field(ge=1, description="Width inside the MLP.")
    num_attention_heads: int = Field(ge=1, description="Query heads.")
    num_query_groups: int | None = Field(default=None, ge=1, description="KV heads; null = MHA, 1 = MQA.")
    head_dim: int | None = Field(default=None, ge=1, description="null = hidden_size / num_attention_heads.")
    vocab_size: int = Field(ge=1, description="Rows of the embedding.")
    max_position_embeddings: int = Field(default=2048, ge=1, description="Longest document the model is made for.")
    activation: Activation = Field(default="swiglu", description="The first three have a gate projection.")
    norm: Literal["rmsnorm", "layernorm"] = Field(default="rmsnorm", description="Normalisation.")
    norm_eps: float = Field(default=1e-5, gt=0, description="Added to the variance.")
    norm_placement: Literal["pre", "sandwich"] = Field(
        default="pre", description="sandwich also norms each branch's output."
    )
    norm_offset: bool = Field(default=False, description="Norms multiply by (1 + weight), as Gemma does.")
    attention_bias: bool | Literal["qkv"] = Field(default=False, description="Bias on q, k, v and o; qkv: not on o.")
    mlp_bias: bool = Field(default=False, description="Bias in the MLP.")
    qk_norm: Literal["head", "projection"] | None = Field(
        default=None, description="RMSNorm of q and k, per head (Qwen3) or over all heads (OLMo 2)."
    )
    clip_qkv: float | None = Field(default=None, gt=0, description="Clamp q, k, v to it, as OLMoE does; null = off.")
    tie_embeddings: bool = Field(default=True, description="The head shares the embedding's weight.")
    embedding_scale: float | None = Field(default=None, gt=0, description="Embeddings are multiplied by it.")
    parallel_residual: bool = Field(
        default=False, description="Attention and MLP read the same input, as GPT-NeoX does."
    )
    position_embedding: Literal["rope", "learned"] = Field(default="rope", description="How positions enter.")
    rope: RopeConfig = Field(default=RopeConfig(), description="Rotary position embedding.")
    rope_sliding: RopeConfig | None = Field(
        default=None, description="RoPE of sliding_attention layers; null = `rope`."
    )
    sliding_window: int | None = Field(default=None, description="Keys a token sees, itself included; null = all.")
    layer_types: tuple[LayerType, ...] | None = Field(default=None, description="Per layer; null = all alike.")
    attention_scale: float | None = Field(
        default=None, gt=0, description="Factor on scores; null = 1 / sqrt(head_dim)."
    )
    attention_softcap: float | None = Field(
        default=None, description="Scores become cap * tanh(score / cap); null = off."
    )
    final_softcap: float | None = Field(default=None, description="The same on logits; null = off.")
    attention_dropout: float = Field(default=0.0, ge=0, lt=1, description="Share of attention weights dropped.")
    init_std: float = Field(default=0.02, gt=0, description="Standard deviation of random weights.")

    @property
    def groups(self) -> int:
        """Number of KV heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def dims_per_head(self) -> int:
        """head_dim, derived when null."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate projection."""
        return self.activation in ("swiglu", "geglu", "geglu_tanh")

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return self.attention_scale if self.attention_scale is not None else self.dims_per_head**-0.5

    def window_of(self, layer: int) -> int | None:
        """Sliding window of one layer, or None for full attention."""
        if self.layer_types is not None and self.layer_types[layer] == "full_attention":
            return None
        return self.sliding_window

    def rope_of(self, layer: int) -> RopeConfig:
        """Rotary configuration of one layer."""
        return self.rope_sliding if self.rope_sliding and self.window_of(layer) is not None else self.rope
