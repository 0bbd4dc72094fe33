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

    type: RopeScalingType
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None


class RopeConfig(Section):
    """Rotary position embedding."""

    theta: float = Field(10000.0, gt=0, description="Base of the frequencies.")
    percent: float = Field(1.0, gt=0, le=1, description="Share of head_dim that rotates.")
    interleaved: bool = Field(False, description="Pair dims (2i, 2i+1) instead of (i, i + rot/2).")
    scaling: RopeScaling | None = None


class Architecture(Section):
    """Every number that decides a decoder's shapes and arithmetic."""

    family: Family | None = Field(None, description="Hugging Face family that `freight export` writes; null = chosen.")
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_query_groups: int | None = Field(None, ge=1, description="KV heads; null = multi-head, 1 = multi-query.")
    head_dim: int | None = Field(None, ge=1, description="null = hidden_size / num_attention_heads.")
    vocab_size: int = Field(ge=1)
    max_position_embeddings: int = Field(2048, ge=1)
    activation: Activation = "swiglu"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = Field(1e-5, gt=0)
    norm_placement: Literal["pre", "sandwich"] = Field("pre", description="sandwich also norms each branch's output.")
    norm_offset: bool = Field(False, description="Norms multiply by (1 + weight), as Gemma does.")
    attention_bias: bool | Literal["qkv"] = Field(False, description="Bias on q, k, v and o; `qkv`: not on o.")
    mlp_bias: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    clip_qkv: float | None = Field(None, gt=0)
    tie_embeddings: bool = True
    embedding_scale: float | None = Field(None, gt=0, description="Embeddings are multiplied by it.")
    parallel_residual: bool = Field(False, description="Attention and MLP read the same input, as GPT-NeoX does.")
    position_embedding: Literal["rope", "learned"] = "rope"
    rope: RopeConfig = RopeConfig()
    rope_sliding: RopeConfig | None = Field(None, description="RoPE of sliding_attention layers; null = `rope`.")
    sliding_window: int | None = Field(None, description="Keys a token sees, itself included; null = all.")
    layer_types: tuple[LayerType, ...] | None = Field(None, description="Per layer; null = all alike.")
    attention_scale: float | None = Field(None, gt=0, description="null = 1 / sqrt(head_dim).")
    attention_softcap: float | None = None
    final_softcap: float | None = None
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    init_std: float = Field(0.02, gt=0)

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
