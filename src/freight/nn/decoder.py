"""The decoder: embeddings, blocks, final norm, and a head that turns the last hidden states into what is asked for.

The stream has no batch dim: hidden states are `[tokens, hidden]`, documents are told apart by the batch's integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from freight.config.architecture import Architecture
from freight.nn.block import Block, PlainRunner
from freight.nn.linear import Linear
from freight.nn.loss_head import ChunkedLossHead
from freight.nn.norm import build_norm
from freight.ops.attention import LocalAttention
from freight.ops.batch import TokenBatch, TokenRange
from freight.ops.embedding import embedding
from freight.ops.protocols import AttentionCore, BlockRunner, LossHead


class Decoder(nn.Module):
    """A causal language model.

    Parameters are left unset, on whatever device is current (meta, say): `init_weights` or an importer fills them.

    Args:
        arch: Shapes and arithmetic.
        core: Attention between tokens; by default on this device alone.
        runner: How blocks are executed; plainly by default.
        loss_head: Head of `forward` when none is passed; by default the chunked cross-entropy.
    """

    def __init__(
        self,
        arch: Architecture,
        *,
        core: AttentionCore | None = None,
        runner: BlockRunner | None = None,
        loss_head: LossHead | None = None,
    ) -> None:
        super().__init__()
        self.arch = arch
        self.loss_head: LossHead = loss_head or ChunkedLossHead(softcap=arch.final_softcap)
        attention: AttentionCore = core or LocalAttention()  # pyright: ignore[reportAssignmentType] (eager under compile)
        runner = runner or PlainRunner()
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size, _weight=_unset(arch.vocab_size, arch))
        self.embed_positions: nn.Embedding | None = None
        if arch.position_embedding == "learned":
            rows = arch.max_position_embeddings
            self.embed_positions = nn.Embedding(rows, arch.hidden_size, _weight=_unset(rows, arch))
        self.layers = nn.ModuleList(Block(arch, layer, attention, runner) for layer in range(arch.num_layers))
        self.norm = build_norm(arch)
        self.head = None if arch.tie_embeddings else Linear(arch.hidden_size, arch.vocab_size, bias=False)

    def forward(self, batch: TokenBatch, head: LossHead | None = None) -> Any:
        """Run the batch and hand the final hidden states to a head.

        Args:
            batch: The microbatch.
            head: What to make of the hidden states; the model's own loss head by default.

        Returns:
            What the head returns; `LossSums` by default.
        """
        hidden = self.embed(batch)
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return (head or self.loss_head)(hidden, self.norm, self.head_weight, batch)

    def embed(self, batch: TokenBatch) -> Tensor:
        """Input of the first block, `[tokens, hidden]`; made the way that block is run."""
        weights = [self.embed_tokens.weight]
        if self.embed_positions is not None:
            weights.append(self.embed_positions.weight)
        return self.blocks[0].run_part("embed", self._embed, batch.range(), *weights)

    def _embed(
        self, tokens: TokenRange, of_tokens: Tensor, of_positions: Tensor | None = None, *, sparse: bool = False
    ) -> Tensor:
        hidden = embedding(tokens.input_ids, of_tokens, sparse=sparse)
        if self.arch.embedding_scale is not None:
            # A tensor of hidden's dtype: models that scale were trained with the factor rounded to it.
            hidden = hidden * torch.full((), self.arch.embedding_scale, dtype=hidden.dtype, device=hidden.device)
        if of_positions is None:
            return hidden
        return hidden + embedding(tokens.position_ids, of_positions, sparse=sparse)

    @property
    def head_weight(self) -> Tensor:
        """`[vocab, hidden]`: the head's own weight, or the token embeddings'."""
        return self.embed_tokens.weight if self.head is None else self.head.weight

    @property
    def blocks(self) -> list[Block]:
        """`layers`, typed."""
        return [block for block in self.layers if isinstance(block, Block)]

    def use_runner(self, runner: BlockRunner) -> None:
        """Execute every block with `runner` from now on."""
        for block in self.blocks:
            block.runner = runner


def _unset(rows: int, arch: Architecture) -> Tensor:
    return torch.empty(rows, arch.hidden_size)
