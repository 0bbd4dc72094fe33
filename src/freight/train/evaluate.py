"""Held-out loss: the exact mean over every label token, each document once.

Sums and counts travel, never means, so the number does not depend on how documents were packed into rows or rows into
microbatches. Per-token losses are float32 (float64 for a float64 model), their sums float64. Logits exist for a few
hundred label tokens at a time and for no other token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from freight.errors import DataError
from freight.ops.batch import IGNORE_INDEX, TokenBatch
from freight.ops.linear import linear

CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Evaluation:
    """Losses over some documents.

    Args:
        loss: Mean negative log-likelihood per label token, natural log.
        tokens: Label tokens.
        documents: Documents seen; pieces of one document count once each.
        per_source: The same for every source, if sources are known; empty otherwise.
    """

    loss: float
    tokens: int
    documents: int
    per_source: dict[str, Evaluation] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp(loss); inf where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def metrics(self) -> dict[str, float]:
        """As they stand in `metrics.jsonl`: `eval/loss`, `eval/perplexity`, `eval/tokens`, `eval/loss/<source>`."""
        sources = {f"eval/loss/{name}": part.loss for name, part in self.per_source.items()}
        return {"eval/loss": self.loss, "eval/perplexity": self.perplexity, "eval/tokens": self.tokens, **sources}


@dataclass
class _Sums:
    nll: float = 0.0
    tokens: int = 0
    documents: int = 0

    def add(self, nll: float, tokens: int) -> None:
        self.nll += nll
        self.tokens += tokens
        self.documents += 1

    def finish(self, per_source: dict[str, Evaluation] | None = None) -> Evaluation:
        loss = self.nll / self.tokens if self.tokens else math.nan
        return Evaluation(loss, self.tokens, self.documents, per_source or {})


@dataclass(frozen=True)
class SegmentLossHead:
    """A loss head that returns one negative log-likelihood sum per segment of the batch, float64 `[segments]`.

    Args:
        softcap: Logits become `softcap * tanh(logit / softcap)`.
        chunk_tokens: Label tokens whose logits exist at one time.
    """

    softcap: float | None = None
    chunk_tokens: int = CHUNK_TOKENS

    def __call__(self, hidden: Tensor, weight: Tensor, batch: TokenBatch) -> Tensor:
        """See `LossHead`."""
        rows = torch.nonzero(batch.labels != IGNORE_INDEX).squeeze(1)
        bounds = torch.tensor(batch.cu_seqlens[1:], device=hidden.device)
        segments = torch.bucketize(rows, bounds, right=True)
        sums = torch.zeros(len(batch.lengths), dtype=torch.float64, device=hidden.device)
        for part, where in zip(rows.split(self.chunk_tokens), segments.split(self.chunk_tokens)):
            logits = linear(hidden[part], weight, None)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            nll = nn.functional.cross_entropy(logits, batch.labels[part], reduction="none")
            sums.index_add_(0, where, nll.double())
        return sums


def evaluate(
    model: nn.Module,
    batches: Iterable[TokenBatch],
    *,
    source_of: Callable[[int], str] | None = None,
    softcap: float | None = None,
    device: torch.device | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    total_documents: int = 0,
) -> Evaluation:
    """Exact token mean over every document of the batches.

    Args:
        model: `model(batch, head)`; its mode is restored afterwards.
        batches: Every document once, packed in any way; segments of length 0 are padding.
        source_of: Name of the source of a document, by the index that the batch carries.
        softcap: The model's final softcap.
        device: Where the model computes; by default where its first parameter is.
        progress: Called with documents done.
        total_documents: For `progress`.

    Raises:
        DataError: No label token in all batches: there is nothing to take a mean of.
    """
    device = device or next(model.parameters()).device
    head = SegmentLossHead(softcap)
    total = _Sums()
    sources: dict[str, _Sums] = {}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                sums = model(batch.to(device), head).tolist()
                for segment, tokens in enumerate(_labels_per_segment(batch)):
                    if not batch.lengths[segment]:
                        continue
                    total.add(sums[segment], tokens)
                    if source_of is not None and batch.documents:
                        name = source_of(batch.documents[segment])
                        sources.setdefault(name, _Sums()).add(sums[segment], tokens)
                if progress is not None:
                    progress(total.documents, total_documents, "evaluate")
    finally:
        model.train(was_training)
    if not total.tokens:
        raise DataError(
            f"validation: 0 tokens to predict in {total.documents} documents; give `data.validation` records with answers."
        )
    return total.finish({name: part.finish() for name, part in sorted(sources.items())})


def _labels_per_segment(batch: TokenBatch) -> list[int]:
    """Label tokens of each segment, from the batch as the loader made it, before it moves to a device."""
    counted = torch.cumsum(batch.labels.cpu() != IGNORE_INDEX, dim=0)
    ends = counted[torch.tensor(batch.cu_seqlens[1:]) - 1].tolist()
    return [end - start for start, end in zip([0, *ends], ends)]
