"""One layer as `pre -> core -> post`, and the object that decides how it is executed.

`pre` and `post` are token-wise, so a runner may feed them any range of tokens; `core` is where tokens meet. The parts
are named through `run_part`, which is all that a runner needs to discard and replay one of them. A block never knows
how it is run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from freight.config.architecture import Architecture
from freight.nn.attention import Attention, shared_rotation
from freight.nn.mlp import MLP
from freight.nn.norm import build_norm
from freight.ops.batch import TokenBatch, TokenRange
from freight.ops.protocols import AttentionCore, AttentionSpec, BlockRunner, RunnableBlock


class PlainRunner:
    """Runs a block as it is written; autograd keeps what it needs."""

    def run(self, block: RunnableBlock, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """`[tokens, hidden]` -> `[tokens, hidden]`."""
        tokens = batch.range()
        q, k, v = block.pre(hidden, tokens)
        return block.post(hidden, block.core(q, k, v, batch), tokens)

    def run_part(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Just the call."""
        return function(*inputs)


class Block(nn.Module):
    """A decoder layer.

    With norms N, attention A, feed-forward M (and norms S of their outputs, when sandwiched):
    sequential `h = x + S(A(N(x)))`, `y = h + S(M(N(h)))`; parallel `y = x + S(A(N(x))) + S(M(N(x)))`.

    Args:
        arch: The decoder.
        layer: Global index.
        core: Attention between tokens.
        runner: How the block is executed; may be exchanged at any time.
    """

    def __init__(self, arch: Architecture, layer: int, core: AttentionCore, runner: BlockRunner) -> None:
        super().__init__()
        self.attention_core = core
        self.runner = runner
        self.parallel = arch.parallel_residual
        self.attention_norm = build_norm(arch)
        self.attention = Attention(arch, layer)
        self.mlp_norm = build_norm(arch)
        self.mlp = MLP(arch)
        sandwich = arch.norm_placement == "sandwich"
        self.post_attention_norm = build_norm(arch) if sandwich else None
        self.post_mlp_norm = build_norm(arch) if sandwich else None

    def forward(self, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """`[tokens, hidden]` -> `[tokens, hidden]`; the only entry, so that hooks around a block fire."""
        return self.runner.run(self, hidden, batch)

    def run_part(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run a named part the way the runner wants."""
        return self.runner.run_part(name, function, *inputs)

    @property
    def attention_spec(self) -> AttentionSpec:
        """What is asked of attention now: without dropout outside training."""
        spec, dropout = self.attention.spec, self.attention.dropout
        return replace(spec, dropout=dropout) if self.training and dropout else spec

    def pre(self, hidden: Tensor, tokens: TokenRange) -> tuple[Tensor, Tensor, Tensor]:
        """`[tokens, hidden]` -> q `[tokens, heads, head_dim]`, k and v `[tokens, groups, head_dim]`."""
        return self._project(self.attention.project, hidden, tokens)

    def keys(self, hidden: Tensor, tokens: TokenRange) -> tuple[Tensor, Tensor]:
        """Keys and values as `pre` makes them, without queries."""
        return self._project(self.attention.project_keys, hidden, tokens)

    def _project(self, project: Callable[..., Any], hidden: Tensor, tokens: TokenRange) -> Any:
        rope = self.attention.rope
        rotation = shared_rotation(tokens, rope, hidden.dtype)  # pyright: ignore[reportCallIssue] (decorator hides it)
        normed = self.run_part("norm", self.attention_norm, hidden)
        return self.run_part("qkv", project, normed, rotation, tokens)

    def core(self, q: Tensor, k: Tensor, v: Tensor, batch: TokenBatch) -> Tensor:
        """Attention -> context `[tokens, heads, head_dim]`."""
        return self.run_part("core", self.attention_core, q, k, v, batch, self.attention_spec)

    def post(self, hidden: Tensor, context: Tensor, tokens: TokenRange) -> Tensor:
        """Hidden states and context -> `[tokens, hidden]`."""
        attended = self.attention.output(context, tokens)
        if self.post_attention_norm is not None:
            attended = self.run_part("norm", self.post_attention_norm, attended)
        after = hidden + attended
        normed = self.run_part("norm", self.mlp_norm, hidden if self.parallel else after)
        fed = self.run_part("mlp", self.mlp, normed, tokens, self.run_part)
        if self.post_mlp_norm is not None:
            fed = self.run_part("norm", self.post_mlp_norm, fed)
        return after + fed
