"""Held-out loss: the exact mean over every label token, each document once.

Sums and counts travel, never means, so the number does not depend on how documents were packed into rows or rows into
microbatches. Per-token losses are float32 (float64 for a float64 model), their sums float64. Logits exist for a few
hundred label tokens at a time and for no other token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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

    def add(self, nll: float, tokens: int, documents: int) -> None:
        self.nll += nll
        self.tokens += tokens
        self.documents += documents

    def finish(self, per_source: dict[str, Evaluation] | None = None) -> Evaluation:
        loss = self.nll / self.tokens if self.tokens else math.nan
        return Evaluation(loss, self.tokens, self.documents, per_source or {})


# By source; None where sources are not known.
Sums = dict[str | None, _Sums]


def evaluate(
    model: Decoder,
    batches: Iterable[TokenBatch],
    *,
    deal: Callable[[TokenBatch], TokenBatch] = lambda batch: batch,
    gather: Callable[[Sums], Sequence[Sums]] = lambda sums: [sums],
    counts_documents: bool = True,
    source_of: Callable[[int], str] | None = None,
    chunk_tokens: int = 512,
    progress: Callable[[int, int, str], None] | None = None,
    total_documents: int = 0,
) -> Evaluation:
    """Exact token mean over every document of the batches.

    Args:
        model: Its mode (training or not) is restored afterwards.
        batches: Every document once over all data ranks, packed in any way; segments of length 0 are padding.
        deal: Gives this rank's part of a batch.
        gather: Gives what all ranks counted.
        counts_documents: One of the ranks that share a batch counts its documents.
        source_of: Name of the source of a document, by the index that the batch carries.
        chunk_tokens: Label tokens whose logits exist at one time.
        progress: Called with segments done.
        total_documents: For `progress`; 0 if not known.

    Raises:
        DataError: No label token in all batches: there is nothing to take a mean of.
    """
    device = next(model.parameters()).device
    head = TokenLossHead(chunk_tokens, model.arch.final_softcap)
    here: Sums = {}
    seen = 0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in map(deal, batches):
                losses = model(batch.to(device), head)
                for segment, nll, tokens in _segment_sums(losses, batch):
                    source = source_of(batch.documents[segment]) if source_of and batch.documents else None
                    here.setdefault(source, _Sums()).add(nll, tokens, int(counts_documents))
                    seen += 1
                if progress is not None:
                    progress(seen, total_documents, "evaluate")
    finally:
        model.train(was_training)
    sources = _joined(gather(here))
    total = _Sums()
    for part in sources.values():
        total.add(part.nll, part.tokens, part.documents)
    if not total.tokens:
        raise DataError(
            f"validation data: no token to predict in {total.documents} documents. "
            "Give `data.validation` records that have an answer."
        )
    return total.finish({name: sources[name].finish() for name in sorted(filter(None, sources))})


def _joined(of_ranks: Iterable[Sums]) -> Sums:
    """The sums of all ranks, by source."""
    joined: Sums = {}
    for of_rank in of_ranks:
        for name, part in of_rank.items():
            joined.setdefault(name, _Sums()).add(part.nll, part.tokens, part.documents)
    return joined


def _segment_sums(losses: Tensor, batch: TokenBatch) -> Iterator[tuple[int, float, int]]:
    """(segment, sum of its losses, its label tokens) of every segment that is a document; one read of the device."""
    segments, number = batch.segments.to(losses.device), len(batch.lengths)
    sums = losses.new_zeros(number, dtype=torch.float64).index_add_(0, segments, losses.double())
    counted = (batch.labels != IGNORE_INDEX).to(sums)
    counts = torch.zeros_like(sums).index_add_(0, segments, counted)
    nlls, tokens = torch.stack([sums, counts]).tolist()
    for segment, length in enumerate(batch.lengths):
        if length:
            yield segment, nlls[segment], int(tokens[segment])
