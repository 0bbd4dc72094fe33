"""The dense feed-forward part of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from freight.config.architecture import Architecture
from freight.nn.linear import Linear
from freight.ops.activation import activation, gated_activation
from freight.ops.batch import TokenRange

RunPart = Callable[..., Any]


class MLP(nn.Module):
    """`down(f(gate(x)) * up(x))` when gated, else `down(f(up(x)))`."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.kind = arch.activation
        self.gate_proj = Linear(arch.hidden_size, arch.ffn_hidden_size, arch.mlp_bias) if arch.gated else None
        self.up_proj = Linear(arch.hidden_size, arch.ffn_hidden_size, arch.mlp_bias)
        self.down_proj = Linear(arch.ffn_hidden_size, arch.hidden_size, arch.mlp_bias)

    def forward(self, x: Tensor, tokens: TokenRange, run_part: RunPart) -> Tensor:
        """`[tokens, hidden]` -> `[tokens, hidden]`.

        Args:
            x: Normed hidden states.
            tokens: Which tokens they are.
            run_part: Runs the `activation` part.
        """
        if self.gate_proj is None:
            return self.down_proj(run_part("activation", activation, self.up_proj(x, tokens), self.kind), tokens)
        gate, up = self.gate_proj(x, tokens), self.up_proj(x, tokens)
        return self.down_proj(run_part("activation", gated_activation, gate, up, self.kind), tokens)
