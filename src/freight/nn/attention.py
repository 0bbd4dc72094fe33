"""What attention computes token by token: projections, q/k norm, rotary embedding. Tokens meet in the core."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from freight.config.architecture import Architecture
from freight.nn.linear import Linear
from freight.nn.norm import RMSNorm
from freight.ops.batch import TokenRange
from freight.ops.protocols import AttentionSpec
from freight.ops.rope import RopeSpec, apply_rope, rotation

Rotation = tuple[Tensor, Tensor]


@torch.compiler.disable  # the cache is a dict of the batch: a compiled lookup would be compiled anew for every batch
def shared_rotation(tokens: TokenRange, spec: RopeSpec | None, dtype: torch.dtype) -> Rotation | None:
    """Cos and sin of a range of tokens, made once for all layers that rotate alike; None without RoPE."""
    if spec is None:
        return None

    def make() -> Rotation:
        return rotation(tokens.position_ids, tokens.document_lengths, spec, dtype)

    return tokens.cached(("rotation", spec, dtype), make)


class Attention(nn.Module):
    """Projections of one layer.

    Args:
        arch: The decoder.
        layer: Global index of the layer: decides window and rotation.
    """

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        head_dim = arch.dims_per_head
        q_width, kv_width = arch.num_attention_heads * head_dim, arch.groups * head_dim
        qkv_bias = bool(arch.attention_bias)
        self.head_dim = head_dim
        self.clip = arch.clip_qkv
        self.norm_heads = arch.qk_norm == "head"
        self.dropout = arch.attention_dropout
        self.spec = AttentionSpec(
            scale=arch.scale, window=arch.window_of(layer), softcap=arch.attention_softcap, layer=layer
        )
        self.rope: RopeSpec | None = None
        if arch.position_embedding == "rope":
            self.rope = RopeSpec.from_config(arch.rope_of(layer), head_dim, arch.max_position_embeddings)
        self.q_proj = Linear(arch.hidden_size, q_width, qkv_bias)
        self.k_proj = Linear(arch.hidden_size, kv_width, qkv_bias)
        self.v_proj = Linear(arch.hidden_size, kv_width, qkv_bias)
        self.o_proj = Linear(q_width, arch.hidden_size, arch.attention_bias is True)
        self.q_norm = self.k_norm = None
        if arch.qk_norm is not None:
            self.q_norm = RMSNorm(head_dim if self.norm_heads else q_width, arch.norm_eps, arch.norm_offset)
            self.k_norm = RMSNorm(head_dim if self.norm_heads else kv_width, arch.norm_eps, arch.norm_offset)

    def project(self, x: Tensor, rotation: Rotation | None, tokens: TokenRange) -> tuple[Tensor, Tensor, Tensor]:
        """Normed hidden states -> q, k, v `[tokens, heads or groups, head_dim]`, rotated."""
        q = self._rotated(self._heads(self.q_proj(x, tokens), self.q_norm), rotation)
        return q, *self.project_keys(x, rotation, tokens)

    def project_keys(self, x: Tensor, rotation: Rotation | None, tokens: TokenRange) -> tuple[Tensor, Tensor]:
        """`k` and `v` of `project`."""
        k = self._rotated(self._heads(self.k_proj(x, tokens), self.k_norm), rotation)
        return k, self._heads(self.v_proj(x, tokens), None)

    def _rotated(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        return x if self.rope is None or rotation is None else apply_rope(x, *rotation, self.rope.config.interleaved)

    def _heads(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        if norm is not None and not self.norm_heads:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))  # [tokens, heads * head_dim] -> [tokens, heads, head_dim]
        if norm is not None and self.norm_heads:
            x = norm(x)
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def output(self, context: Tensor, tokens: TokenRange) -> Tensor:
        """Context `[tokens, heads, head_dim]` -> `[tokens, hidden]`."""
        return self.o_proj(context.flatten(-2), tokens)
