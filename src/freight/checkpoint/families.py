"""The Hugging Face families: which config key is which field of `Architecture`, which stored tensor is which parameter.

One table per family, read in both directions: import looks up from left to right, export from right to left, so the
two cannot drift apart. What needs more than a lookup (rotary embeddings, sliding windows) is named here and computed in
`rope_keys.py` and `hf_config.py`. Defaults are those of transformers' config classes; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from freight.checkpoint.layouts import BY_HEAD, CONV1D, FUSED_CONV1D, PLAIN, Layout


@dataclass(frozen=True)
class Key:
    """A key of config.json that is one field of `Architecture`.

    Args:
        name: Name of the key.
        default: What transformers assumes where the key is absent; None also where it derives a value.
        required: An absent key is an error: a guess would decide shapes.
    """

    name: str
    default: Any = None
    required: bool = False


@dataclass(frozen=True)
class Stored:
    """A stored module and the modules of ours that it holds.

    Args:
        name: Stored name; `{i}` is the layer.
        parts: Our names, in the order in which they are stored.
        layout: How the parts are laid out in the stored tensor.
    """

    name: str
    parts: tuple[str, ...]
    layout: Layout = PLAIN


Windows = Literal["none", "uniform", "switched", "per_layer"]


@dataclass(frozen=True)
class Family:
    """What transformers' `model_type` means.

    Args:
        name: `model_type`.
        class_name: Entry of `architectures`.
        base: Prefix of every tensor but the head; files saved from the base model lack it.
        keys: Field of `Architecture` -> key.
        activations: Our activation -> its first spelling; other spellings follow.
        modules: Stored modules.
        fixed: Fields that the family fixes.
        windows: How a sliding window is written: not at all, for all layers, behind `use_sliding_window`, per layer.
        rotary: Spellings of theta and share of head_dim from before `rope_parameters`, and the default share;
            None where positions are learned.
        refused: Keys that change the arithmetic in ways the decoder does not have -> the values that do not.
        written: Keys of the export that carry nothing of the architecture.
        unused: Patterns of stored buffers that are not weights.
    """

    name: str
    class_name: str
    base: str
    keys: Mapping[str, Key]
    activation_key: Key
    activations: Mapping[str, tuple[str, ...]]
    modules: tuple[Stored, ...]
    fixed: Mapping[str, Any]
    windows: Windows = "none"
    default_window: int | None = None
    rotary: tuple[str, str, float] | None = ("rope_theta", "partial_rotary_factor", 1.0)
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)


GATED = {
    "swiglu": ("silu", "swish"),
    "geglu": ("gelu",),
    "geglu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
}
PLAIN_ACTIVATIONS = {
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "relu2": ("relu2",),
}


def _modules_of_llama(norms: dict[str, str], qk_norm: bool = False) -> tuple[Stored, ...]:
    layer = {
        **norms,
        **{f"self_attn.{name}_proj": f"attention.{name}_proj" for name in "qkvo"},
        **({f"self_attn.{name}_norm": f"attention.{name}_norm" for name in "qk"} if qk_norm else {}),
        **{f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }
    return (
        Stored("model.embed_tokens", ("embed_tokens",)),
        *(Stored(f"model.layers.{{i}}.{theirs}", (f"layers.{{i}}.{ours}",)) for theirs, ours in layer.items()),
        Stored("model.norm", ("norm",)),
        Stored("lm_head", ("head",)),
    )


def _keys_of_llama(**changed: Key) -> dict[str, Key]:
    return {
        "num_layers": Key("num_hidden_layers", required=True),
        "hidden_size": Key("hidden_size", required=True),
        "ffn_hidden_size": Key("intermediate_size", required=True),
        "num_attention_heads": Key("num_attention_heads", required=True),
        "num_query_groups": Key("num_key_value_heads"),
        "head_dim": Key("head_dim"),
        "vocab_size": Key("vocab_size", required=True),
        "max_position_embeddings": Key("max_position_embeddings", 2048),
        "norm_eps": Key("rms_norm_eps", 1e-6),
        "tie_embeddings": Key("tie_word_embeddings", False),
        "attention_dropout": Key("attention_dropout", 0.0),
        "init_std": Key("initializer_range", 0.02),
        **changed,
    }


_LLAMA_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_GEMMA2_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
_RMS = {"norm": "rmsnorm", "position_embedding": "rope"}

LLAMA = Family(
    name="llama",
    class_name="LlamaForCausalLM",
    base="model.",
    keys=_keys_of_llama(attention_bias=Key("attention_bias", False), mlp_bias=Key("mlp_bias", False)),
    activation_key=Key("hidden_act", "silu"),
    activations=GATED,
    modules=_modules_of_llama(_LLAMA_NORMS),
    fixed=_RMS,
)

MISTRAL = Family(
    name="mistral",
    class_name="MistralForCausalLM",
    base="model.",
    keys=_keys_of_llama(
        num_query_groups=Key("num_key_value_heads", 8), max_position_embeddings=Key("max_position_embeddings", 131072)
    ),
    activation_key=Key("hidden_act", "silu"),
    activations=GATED,
    modules=_modules_of_llama(_LLAMA_NORMS),
    fixed={**_RMS, "attention_bias": False, "mlp_bias": False},
    windows="uniform",
    default_window=4096,
)

QWEN2 = Family(
    name="qwen2",
    class_name="Qwen2ForCausalLM",
    base="model.",
    keys=_keys_of_llama(
        num_query_groups=Key("num_key_value_heads", 32), max_position_embeddings=Key("max_position_embeddings", 32768)
    ),
    activation_key=Key("hidden_act", "silu"),
    activations=GATED,
    modules=_modules_of_llama(_LLAMA_NORMS),
    fixed={**_RMS, "attention_bias": "qkv", "mlp_bias": False},
    windows="switched",
    default_window=4096,
)

QWEN3 = Family(
    name="qwen3",
    class_name="Qwen3ForCausalLM",
    base="model.",
    keys=_keys_of_llama(
        num_query_groups=Key("num_key_value_heads", 32),
        head_dim=Key("head_dim", 128),
        max_position_embeddings=Key("max_position_embeddings", 32768),
        attention_bias=Key("attention_bias", False),
    ),
    activation_key=Key("hidden_act", "silu"),
    activations=GATED,
    modules=_modules_of_llama(_LLAMA_NORMS, qk_norm=True),
    fixed={**_RMS, "qk_norm": "head", "mlp_bias": False},
    windows="switched",
    default_window=4096,
)

GEMMA2 = Family(
    name="gemma2",
    class_name="Gemma2ForCausalLM",
    base="model.",
    keys=_keys_of_llama(
        num_query_groups=Key("num_key_value_heads", 4),
        head_dim=Key("head_dim", 256),
        max_position_embeddings=Key("max_position_embeddings", 8192),
        tie_embeddings=Key("tie_word_embeddings", True),
        attention_bias=Key("attention_bias", False),
        attention_softcap=Key("attn_logit_softcapping", 50.0),
        final_softcap=Key("final_logit_softcapping", 30.0),
    ),
    activation_key=Key("hidden_activation", "gelu_pytorch_tanh"),
    activations=GATED,
    modules=_modules_of_llama(_GEMMA2_NORMS),
    fixed={**_RMS, "norm_placement": "sandwich", "norm_offset": True, "mlp_bias": False},
    windows="per_layer",
    default_window=4096,
    refused={"use_bidirectional_attention": (None, False)},
)

GPT2 = Family(
    name="gpt2",
    class_name="GPT2LMHeadModel",
    base="transformer.",
    keys={
        "num_layers": Key("n_layer", required=True),
        "hidden_size": Key("n_embd", required=True),
        "ffn_hidden_size": Key("n_inner"),
        "num_attention_heads": Key("n_head", required=True),
        "vocab_size": Key("vocab_size", required=True),
        "max_position_embeddings": Key("n_positions", 1024),
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "tie_embeddings": Key("tie_word_embeddings", True),
        "attention_dropout": Key("attn_pdrop", 0.1),
        "init_std": Key("initializer_range", 0.02),
    },
    activation_key=Key("activation_function", "gelu_new"),
    activations=PLAIN_ACTIVATIONS,
    modules=(
        Stored("transformer.wte", ("embed_tokens",)),
        Stored("transformer.wpe", ("embed_positions",)),
        Stored("transformer.h.{i}.ln_1", ("layers.{i}.attention_norm",)),
        Stored("transformer.h.{i}.attn.c_attn", tuple(f"layers.{{i}}.attention.{x}_proj" for x in "qkv"), FUSED_CONV1D),
        Stored("transformer.h.{i}.attn.c_proj", ("layers.{i}.attention.o_proj",), CONV1D),
        Stored("transformer.h.{i}.ln_2", ("layers.{i}.mlp_norm",)),
        Stored("transformer.h.{i}.mlp.c_fc", ("layers.{i}.mlp.up_proj",), CONV1D),
        Stored("transformer.h.{i}.mlp.c_proj", ("layers.{i}.mlp.down_proj",), CONV1D),
        Stored("transformer.ln_f", ("norm",)),
        Stored("lm_head", ("head",)),
    ),
    fixed={"norm": "layernorm", "position_embedding": "learned", "attention_bias": True, "mlp_bias": True},
    rotary=None,
    refused={"scale_attn_by_inverse_layer_idx": (None, False), "add_cross_attention": (None, False)},
    written={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    unused=(r".*\.attn\.(masked_)?bias",),
)

GPT_NEOX = Family(
    name="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    base="gpt_neox.",
    keys={
        "num_layers": Key("num_hidden_layers", required=True),
        "hidden_size": Key("hidden_size", required=True),
        "ffn_hidden_size": Key("intermediate_size", required=True),
        "num_attention_heads": Key("num_attention_heads", required=True),
        "vocab_size": Key("vocab_size", required=True),
        "max_position_embeddings": Key("max_position_embeddings", 2048),
        "norm_eps": Key("layer_norm_eps", 1e-5),
        "tie_embeddings": Key("tie_word_embeddings", False),
        "attention_bias": Key("attention_bias", True),
        "attention_dropout": Key("attention_dropout", 0.0),
        "parallel_residual": Key("use_parallel_residual", True),
        "init_std": Key("initializer_range", 0.02),
    },
    activation_key=Key("hidden_act", "gelu"),
    activations=PLAIN_ACTIVATIONS,
    modules=(
        Stored("gpt_neox.embed_in", ("embed_tokens",)),
        Stored("gpt_neox.layers.{i}.input_layernorm", ("layers.{i}.attention_norm",)),
        Stored(
            "gpt_neox.layers.{i}.attention.query_key_value",
            tuple(f"layers.{{i}}.attention.{x}_proj" for x in "qkv"),
            BY_HEAD,
        ),
        Stored("gpt_neox.layers.{i}.attention.dense", ("layers.{i}.attention.o_proj",)),
        Stored("gpt_neox.layers.{i}.post_attention_layernorm", ("layers.{i}.mlp_norm",)),
        Stored("gpt_neox.layers.{i}.mlp.dense_h_to_4h", ("layers.{i}.mlp.up_proj",)),
        Stored("gpt_neox.layers.{i}.mlp.dense_4h_to_h", ("layers.{i}.mlp.down_proj",)),
        Stored("gpt_neox.final_layer_norm", ("norm",)),
        Stored("embed_out", ("head",)),
    ),
    fixed={"norm": "layernorm", "position_embedding": "rope", "mlp_bias": True},
    rotary=("rotary_emb_base", "rotary_pct", 0.25),
    written={"hidden_dropout": 0.0},
    unused=(r".*rotary_emb\.inv_freq", r".*\.attention\.(masked_)?bias"),
)

FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GPT2, GPT_NEOX)}
