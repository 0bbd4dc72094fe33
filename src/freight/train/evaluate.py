"""Held-out loss: the exact mean over every label token, each document once.

Sums and counts travel, never means, so the number does not depend on how documents were packed into rows or rows into
microbatches. Per-token losses are float32 (float64 for a float64 model), their sums float64. Logits exist for a few
hundred label tokens at a time and for no other token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freight.errors import DataError
from freight.nn.decoder import Decoder
from freight.nn.loss_head import TokenLossHead
from freight.ops.batch import IGNORE_INDEX, TokenBatch


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


def evaluate(
    model: Decoder,
    batches: Iterable[TokenBatch],
    *,
    source_of: Callable[[int], str] | None = None,
    chunk_tokens: int = 512,
    progress: Callable[[int, int, str], None] | None = None,
    total_documents: int = 0,
) -> Evaluation:
    """Exact token mean over every document of the batches.

    Args:
        model: Its mode (training or not) is restored afterwards.
        batches: Every document once, packed in any way; segments of length 0 are padding.
        source_of: Name of the source of a document, by the index that the batch carries.
        chunk_tokens: Label tokens whose logits exist at one time.
        progress: Called with segments done.
        total_documents: For `progress`; 0 if not known.

    Raises:
        DataError: No label token in all batches: there is nothing to take a mean of.
    """
    device = next(model.parameters()).device
    head = TokenLossHead(chunk_tokens, model.arch.final_softcap)
    total = _Sums()
    sources: dict[str, _Sums] = {}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                losses = model(batch.to(device), head)
                for segment, nll, tokens in _segment_sums(losses, batch):
                    total.add(nll, tokens)
                    if source_of is not None and batch.documents:
                        sources.setdefault(source_of(batch.documents[segment]), _Sums()).add(nll, tokens)
                if progress is not None:
                    progress(total.documents, total_documents, "evaluate")
    finally:
        model.train(was_training)
    if not total.tokens:
        raise DataError(
            f"validation data: no token to predict in {total.documents} documents. "
            "Give `data.validation` records that have an answer."
        )
    return total.finish({name: part.finish() for name, part in sorted(sources.items())})


def _segment_sums(losses: Tensor, batch: TokenBatch) -> Iterator[tuple[int, float, int]]:
    """(segment, sum of its losses, its label tokens) of every segment that is a document; one read of the device."""
    spans = [segment for segment, length in enumerate(batch.lengths) if length]
    counted = (batch.labels != IGNORE_INDEX).to(losses.device)
    sizes = [stop - start for start, stop in itertools.pairwise(batch.cu_seqlens)]
    sums = torch.stack([part.double().sum() for part in losses.split(sizes)])
    counts = torch.stack([part.sum() for part in counted.split(sizes)])
    nlls, tokens = torch.stack([sums, counts.double()]).tolist()
    for segment in spans:
        yield segment, nlls[segment], int(tokens[segment])
