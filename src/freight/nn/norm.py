"""Norm modules; the arithmetic stands in `ops/norm.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from freight.config.architecture import Architecture
from freight.ops.norm import layer_norm, rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim.

    Args:
        size: Of the last dim.
        eps: Added to the mean square.
        offset: Multiply by `1 + weight`.
    """

    def __init__(self, size: int, eps: float, offset: bool) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps, self.offset)


class LayerNorm(nn.Module):
    """Norm over mean and variance of the last dim, with a bias.

    Args:
        size: Of the last dim.
        eps: Added to the variance.
        offset: Multiply by `1 + weight`.
    """

    def __init__(self, size: int, eps: float, offset: bool) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` -> the same shape and dtype."""
        return layer_norm(x, self.weight, self.bias, self.eps, self.offset)


def build_norm(arch: Architecture) -> RMSNorm | LayerNorm:
    """The norm of hidden states that the architecture asks for."""
    kind = LayerNorm if arch.norm == "layernorm" else RMSNorm
    return kind(arch.hidden_size, arch.norm_eps, arch.norm_offset)
