"""The held-out loss against one document at a time with full logits, however the documents are packed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from freight.errors import DataError
from freight.nn.decoder import Decoder
from freight.nn.loss_head import LogitsHead
from freight.ops.batch import IGNORE_INDEX, TokenBatch
from freight.train.evaluate import Evaluation, evaluate
from tests.nn.small_decoders import VARIANTS, build

DOCUMENTS = [[1, 5, 2, 9], [30, 4], [4, 7, 11, 3, 8], [6], [12, 13, 14]]
LABELS = [[5, IGNORE_INDEX, 9, IGNORE_INDEX], [4, 17], [IGNORE_INDEX] * 5, [7], [13, 14, IGNORE_INDEX]]


def alone(model: Decoder, documents: Sequence[int] = range(5)) -> tuple[float, int]:
    """Sum of losses and number of labels, document by document."""
    total, count = 0.0, 0
    for index in documents:
        batch = TokenBatch.from_documents([DOCUMENTS[index]])
        logits = model(batch, LogitsHead(softcap=model.arch.final_softcap)).detach()
        for row, label in zip(logits, LABELS[index], strict=True):
            if label != IGNORE_INDEX:
                total += float(F.cross_entropy(row[None], torch.tensor([label])))
                count += 1
    return total, count


def packed(rows: Sequence[Sequence[int]], pad: int = 0) -> list[TokenBatch]:
    """Each row of document numbers as one batch."""
    batches = []
    for row in rows:
        ids, labels = [DOCUMENTS[i] for i in row], [LABELS[i] for i in row]
        padded = sum(map(len, ids)) + pad
        numbers = (*row, -1) if pad else tuple(row)
        batches.append(replace(TokenBatch.from_documents(ids, labels, pad_to=padded), documents=numbers))
    return batches


@given(st.permutations(range(5)), st.sets(st.integers(1, 4)), st.integers(0, 3), st.integers(1, 4))
@settings(max_examples=25)
def test_equal_however_documents_are_packed(order: list[int], cuts: set[int], pad: int, chunk: int) -> None:
    model, _ = build(**VARIANTS["gemma2"])
    borders = [0, *sorted(cuts), 5]
    rows = [order[a:b] for a, b in itertools.pairwise(borders)]
    nll, tokens = alone(model)
    result = evaluate(model, packed(rows, pad), chunk_tokens=chunk)
    assert (result.tokens, result.documents) == (tokens, 5)
    assert result.loss == pytest.approx(nll / tokens, rel=1e-10)
    assert result.perplexity == pytest.approx(math.exp(nll / tokens), rel=1e-10)


def test_losses_per_source() -> None:
    model, _ = build()
    result = evaluate(model, packed([[0, 3], [1, 2, 4]], pad=2), source_of=lambda i: "chat" if i < 2 else "code")
    for name, members in (("chat", [0, 1]), ("code", [2, 3, 4])):
        nll, tokens = alone(model, members)
        part = result.per_source[name]
        assert (part.tokens, part.documents) == (tokens, len(members))
        assert part.loss == pytest.approx(nll / tokens, rel=1e-10)
    assert result.metrics() == {
        "eval/loss": result.loss,
        "eval/perplexity": result.perplexity,
        "eval/tokens": 7,
        "eval/loss/chat": result.per_source["chat"].loss,
        "eval/loss/code": result.per_source["code"].loss,
    }


def test_mode_is_restored_and_no_graph_is_made() -> None:
    model, _ = build()
    seen: list[bool] = []
    model.layers[0].register_forward_hook(lambda module, args, out: seen.extend([module.training, out.requires_grad]))
    model.train()
    evaluate(model, packed([[0]]))
    assert model.training
    assert seen == [False, False]
    broken = packed([[0]])[0]
    broken.labels[0] = 99
    with pytest.raises(Exception):  # noqa: B017 - whatever it is, the mode must come back
        evaluate(model, [broken])
    assert model.training
    model.eval()
    evaluate(model, packed([[0]]))
    assert not model.training


def test_nothing_to_predict_is_an_error_not_a_nan() -> None:
    model, _ = build()
    with pytest.raises(DataError, match="no token to predict in 1 documents"):
        evaluate(model, packed([[2]]))


def test_progress_counts_documents() -> None:
    model, _ = build()
    calls: list[tuple[int, int, str]] = []
    evaluate(model, packed([[0, 1], [4]], pad=1), progress=lambda *call: calls.append(call), total_documents=3)
    assert calls == [(2, 3, "evaluate"), (3, 3, "evaluate")]


def test_perplexity_does_not_overflow() -> None:
    assert Evaluation(loss=1000.0, tokens=1, documents=1).perplexity == math.inf
