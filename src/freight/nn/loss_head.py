"""What is done with the last hidden states: a loss in chunks, losses per token, or logits for looking at."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from freight.ops.batch import TokenBatch
from freight.ops.cross_entropy import Recipe, linear_cross_entropy, token_losses
from freight.ops.linear import matmul_float32
from freight.ops.protocols import LossSums
from freight.ops.streamed_cross_entropy import RowStream, streamed_cross_entropy


@dataclass(frozen=True)
class ChunkedLossHead:
    """Cross-entropy summed over the label tokens of a batch, without full logits.

    Args:
        chunk_tokens: Label tokens whose logits exist at one time.
        softcap: Of the logits (`Architecture.final_softcap`).
        label_smoothing: Share of the target spread over the vocabulary.
        z_loss_coeff: Weight of the squared log-partition.
        stream: Where hidden states lie, and how many tokens of them, norm included, are on the device at one time;
            None = all of them.
    """

    chunk_tokens: int = 512
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss_coeff: float | None = None
    stream: RowStream | None = None

    def __call__(self, hidden: Tensor, norm: nn.Module, weight: Tensor, batch: TokenBatch) -> LossSums:
        """`hidden [tokens, hidden]`, `weight [vocab, hidden]` -> sums; the caller divides once."""
        if self.stream is not None:
            recipe = Recipe(self.chunk_tokens, self.softcap, self.label_smoothing, self.z_loss_coeff)
            return streamed_cross_entropy(hidden, norm, weight, batch.labels, recipe, self.stream)
        return linear_cross_entropy(
            norm(hidden),
            weight,
            batch.labels,
            chunk_tokens=self.chunk_tokens,
            softcap=self.softcap,
            label_smoothing=self.label_smoothing,
            z_loss_coeff=self.z_loss_coeff,
        )


@dataclass(frozen=True)
class TokenLossHead:
    """Negative log-likelihood of every label token, for evaluation by document or source; no graph.

    Args:
        chunk_tokens: Label tokens whose logits exist at one time.
        softcap: Of the logits.
    """

    chunk_tokens: int = 512
    softcap: float | None = None

    def __call__(self, hidden: Tensor, norm: nn.Module, weight: Tensor, batch: TokenBatch) -> Tensor:
        """-> float32 `[tokens]` (float64 for float64), 0 where there is no label."""
        return token_losses(norm(hidden), weight, batch.labels, chunk_tokens=self.chunk_tokens, softcap=self.softcap)


@dataclass(frozen=True)
class LogitsHead:
    """Logits of some rows; of all of them only where that many fit in memory.

    Args:
        rows: int64 indices of tokens; None = all.
        softcap: Of the logits.
    """

    rows: Tensor | None = None
    softcap: float | None = None

    def __call__(self, hidden: Tensor, norm: nn.Module, weight: Tensor, batch: TokenBatch) -> Tensor:
        """-> `[rows, vocab]`, float32 for 16-bit hidden states, with a graph unless hidden states are 16-bit."""
        if self.rows is not None:
            hidden = hidden.index_select(0, self.rows)
        logits = matmul_float32(norm(hidden), weight.t())
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap
