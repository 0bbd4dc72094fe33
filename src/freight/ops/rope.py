"""Rotary position embedding, computed from positions.

There is no table and no module buffer: nothing to grow, nothing that `.to(bfloat16)` can round, and any range of tokens
can be rotated alone. Angles are float64, because float32 angles err by 0.0077 at position 128K and by 0.25 at 4M
(theta 1e4). The price, one float64 cos and sin per token and pair, is paid once per microbatch and shared by all
layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freight.config.architecture import RopeConfig, RopeScaling


@dataclass(frozen=True)
class RopeSpec:
    """One way to rotate; hashable, so that layers that agree share one rotation.

    Args:
        head_dim: Dims of a head.
        config: Base, share of dims, pairing and scaling.
        max_position_embeddings: Positions the model is declared for, `N` below.
    """

    head_dim: int
    config: RopeConfig
    max_position_embeddings: int

    @classmethod
    def from_config(cls, config: RopeConfig, head_dim: int, max_position_embeddings: int) -> RopeSpec:
        """The rotation of heads of `head_dim` under `config`."""
        return cls(head_dim, config, max_position_embeddings)

    @property
    def type(self) -> str | None:
        """Scaling type, None for plain RoPE."""
        return self.config.scaling.type if self.config.scaling else None

    @property
    def rotary_dim(self) -> int:
        """Leading dims of each head that rotate; `proportional` rotates all, some by nothing."""
        return self.head_dim if self.type == "proportional" else int(self.head_dim * self.config.percent)

    @property
    def original_length(self) -> int:
        """Length the model was pretrained at."""
        scaling = self.config.scaling
        return (scaling and scaling.original_max_position_embeddings) or self.max_position_embeddings

    @property
    def factor(self) -> float:
        """How far the context is stretched; derived from the two lengths where it may be left out."""
        scaling = self.config.scaling
        if scaling is None:
            return 1.0
        if scaling.factor is not None:
            return scaling.factor
        return self.max_position_embeddings / self.original_length if self.type in ("yarn", "longrope") else 1.0

    @property
    def attention_factor(self) -> float:
        """Factor on cos and sin (YaRN's and LongRoPE's temperature)."""
        scaling, factor = self.config.scaling, self.factor
        if scaling is None or self.type not in ("yarn", "longrope"):
            return 1.0
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        if self.type == "longrope":
            return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(self.original_length))
        if scaling.mscale and scaling.mscale_all_dim:
            return _yarn_temperature(factor, scaling.mscale) / _yarn_temperature(factor, scaling.mscale_all_dim)
        return _yarn_temperature(factor, 1.0)

    def inverse_frequencies(self, document_lengths: Tensor) -> Tensor:
        """Radians per position of each pair of dims.

        Args:
            document_lengths: int64 `[tokens]`, length of the document of each token; only `dynamic` and `longrope` read
                it, so a short document beside a long one is rotated as it would be alone.

        Returns:
            float64 `[rotary_dim / 2]`, or `[tokens, rotary_dim / 2]` for the two types that depend on length.
        """
        device, rot, theta = document_lengths.device, self.rotary_dim, self.config.theta
        pairs = torch.arange(0, rot, 2, dtype=torch.float64, device=device)
        plain = theta ** (-pairs / rot)
        scaling = self.config.scaling
        match self.type:
            case None:
                return plain
            case "linear":
                return plain / self.factor
            case "dynamic":
                longest = self.max_position_embeddings
                lengths = document_lengths.double().clamp(min=longest)
                stretched = theta * (self.factor * lengths / longest - (self.factor - 1)) ** (rot / (rot - 2))
                return stretched[:, None] ** (-pairs / rot)
            case "longrope":
                assert scaling is not None
                short = torch.tensor(scaling.short_factor, dtype=torch.float64, device=device)
                long = torch.tensor(scaling.long_factor, dtype=torch.float64, device=device)
                return plain / torch.where(document_lengths[:, None] > self.original_length, long, short)
            case "proportional":
                rotated = int(self.config.percent * self.head_dim / 2)
                return torch.where(pairs < 2 * rotated, plain / self.factor, 0.0)
            case "llama3":
                assert scaling is not None
                return _llama3(plain, self.original_length, self.factor, scaling)
            case _:
                assert scaling is not None
                return _yarn(plain, theta, rot, self.original_length, self.factor, scaling)


def _llama3(plain: Tensor, original: int, factor: float, scaling: RopeScaling) -> Tensor:
    """Fast pairs keep their frequency, slow ones are divided, those between are blended by their turns."""
    low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 4.0
    turns = original * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (keep + (1 - keep) / factor)


def _yarn(plain: Tensor, theta: float, rot: int, original: int, factor: float, scaling: RopeScaling) -> Tensor:
    """As llama3, but the blend is linear in the index of the pair."""

    def pair_with(turns: float) -> float:
        return rot * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rot - 1)
    if low == high:
        high += 0.001
    index = torch.arange(rot // 2, dtype=torch.float64, device=plain.device)
    divide = ((index - low) / (high - low)).clamp(0, 1)
    return plain * ((1 - divide) + divide / factor)


def _yarn_temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotation(
    position_ids: Tensor, document_lengths: Tensor, spec: RopeSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every token's angles, times the attention factor.

    Args:
        position_ids: int64 `[tokens]`, restarting in every document.
        document_lengths: int64 `[tokens]`.
        spec: What to rotate by.
        dtype: Of the queries; 16-bit queries are rotated in float32.

    Returns:
        cos, sin `[tokens, rotary_dim / 2]`, float64 for float64 queries, else float32.

    Source: RoFormer, arXiv 2104.09864; YaRN, 2309.00071; LongRoPE, 2402.13753.
    """
    angles = position_ids.double()[:, None] * spec.inverse_frequencies(document_lengths)
    dtype = torch.promote_types(dtype, torch.float32)
    return (angles.cos() * spec.attention_factor).to(dtype), (angles.sin() * spec.attention_factor).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the leading `2 * cos.shape[-1]` dims of every head; the rest pass through.

    Args:
        x: `[tokens, heads, head_dim]`.
        cos: `[tokens, rotary_dim / 2]`, as `rotation` gives it.
        sin: As `cos`.
        interleaved: Pair dims `(2i, 2i + 1)` instead of `(i, i + rotary_dim / 2)`.

    Gradient: rotation by the negated angles; only cos and sin are kept for it.
    """
    return _Rotate.apply(x, cos, sin, interleaved)  # pyright: ignore[reportReturnType]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin, ctx.interleaved), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rot = 2 * cos.shape[-1]
    first, second = (slice(0, rot, 2), slice(1, rot, 2)) if interleaved else (slice(rot // 2), slice(rot // 2, rot))
    cos, sin = cos[:, None], sin[:, None]
    a, b = x[..., first].to(cos.dtype), x[..., second].to(cos.dtype)
    out = torch.empty_like(x)
    out[..., first] = (a * cos).addcmul_(b, sin, value=-1)
    out[..., second] = (b * cos).addcmul_(a, sin)
    out[..., rot:] = x[..., rot:]
    return out
