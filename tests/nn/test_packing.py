"""Packed rows compute what their documents compute alone: loss, gradients and step, on every kernel of this machine.

Each property is also held against the five mistakes that packing invites, so that it is known to see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from freight.config.architecture import Architecture
from freight.data.documents import Document, InMemoryDocuments, make_document
from freight.data.load.microbatch import build_microbatch
from freight.data.pack.packing import pack
from freight.data.pack.rows import rows_of
from freight.nn.decoder import Decoder
from freight.nn.init import init_weights
from freight.ops.attention import LocalAttention
from freight.ops.batch import IGNORE_INDEX, TokenBatch
from tests.nn.small_decoders import SMALL

BACKENDS = ("math", "cpu_flash")
LENGTHS = (5, 3, 9, 1, 7, 2, 4)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def documents(seed: int = 0, masked: Sequence[int] = ()) -> list[Document]:
    """Random documents with prompts; those `masked` have no target at all."""
    random = np.random.default_rng(seed)
    return [
        make_document(random.integers(1, 31, n), np.arange(n) >= (n if number in masked else n // 3))
        for number, n in enumerate(LENGTHS)
    ]


def microbatches(
    made: Sequence[Document], pack_size: int = 12, *, multiple: int = 1, pad_id: int = 0, seed: int = 0
) -> list[TokenBatch]:
    """One row each."""
    source = InMemoryDocuments(made)
    plan = pack(source.lengths, "first_fit_shuffle", pack_size, seed, document_multiple=multiple)
    return [
        build_microbatch([row], pack_size=pack_size, num_rows=1, document_multiple=multiple, pad_id=pad_id)
        for row in rows_of(plan, source)
    ]


def alone(made: Sequence[Document]) -> list[TokenBatch]:
    return [TokenBatch.from_documents([d.ids.tolist()], [d.labels().tolist()]) for d in made]


def model_of(backend: str, **changes: object) -> Decoder:
    arch = Architecture.model_validate(SMALL | {"num_query_groups": 2} | changes)
    model = Decoder(arch, core=LocalAttention(backend)).double()
    init_weights(model, 3)
    return model


def step(model: Decoder, batches: Sequence[TokenBatch], mean: str = "tokens") -> dict[str, Tensor]:
    """Loss, every gradient, and every weight after one step of plain gradient descent."""
    targets = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
    model.zero_grad()
    losses = []
    for batch in batches:
        count = int((batch.labels != IGNORE_INDEX).sum())
        share = targets if mean == "tokens" else max(count, 1) * len(batches)
        loss = model(batch).objective / share
        loss.backward()
        losses.append(loss.detach())
    found = {"loss": torch.stack(losses).sum()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[f"grad {name}"] = parameter.grad.clone()
        found[f"step {name}"] = parameter.detach() - 0.1 * parameter.grad
    return found


def differs(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return any(not torch.allclose(first[name], second[name], **TOLERANCE) for name in first)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_gradients_and_step_are_those_of_the_documents_alone(backend: str, window: int | None) -> None:
    model, made = model_of(backend, sliding_window=window), documents()
    expected = step(model, alone(made))
    assert expected["loss"] > 0
    for changes in (
        {},
        {"pad_id": 30},
        {"pack_size": 31},
        {"pack_size": 40},
        {"multiple": 4},
        {"seed": 5},
    ):
        assert not differs(expected, step(model, microbatches(made, **changes))), changes
    assert not differs(expected, step(model, microbatches(made)[::-1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_without_targets_add_nothing(backend: str) -> None:
    model, made = model_of(backend), documents(masked=(0, 3, 4))
    with_targets = [document for document in made if document.num_targets]
    expected = step(model, alone(with_targets))
    assert not differs(expected, step(model, microbatches(made)))
    (nothing,) = microbatches(documents(masked=range(7))[:3], pack_size=20)
    sums = model(nothing)
    model.zero_grad()
    sums.objective.backward()
    assert sums.objective.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_document_moves_no_bit(backend: str) -> None:
    model = model_of(backend)
    losses = []
    for first in ([1, 2, 3], [9, 9, 9]):
        batch = TokenBatch.from_documents([first, [4, 5, 6, 7, 8]], [[-100] * 3, [5, 6, 7, 8, -100]], pad_to=10)
        model.zero_grad()
        sums = model(batch)
        sums.objective.backward()
        losses.append([sums.objective, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def rebuilt(batch: TokenBatch, **changes: object) -> TokenBatch:
    kept = ("input_ids", "labels", "position_ids", "cu_seqlens", "lengths")
    return TokenBatch(**{name: getattr(batch, name) for name in kept} | changes)  # type: ignore[arg-type]


def one_document(batch: TokenBatch) -> TokenBatch:
    """A causal mask over the whole row: positions stay, borders are gone."""
    return rebuilt(batch, cu_seqlens=(0, batch.tokens), lengths=(batch.tokens,))


def positions_run_on(batch: TokenBatch) -> TokenBatch:
    return rebuilt(batch, position_ids=torch.arange(batch.tokens))


def pads_join_the_last(batch: TokenBatch) -> TokenBatch:
    """The last document takes the padding in, and its last token learns to predict it."""
    if batch.lengths[-1]:
        return batch
    end = batch.cu_seqlens[-2]
    labels = batch.labels.clone()
    labels[end - 1] = batch.input_ids[end]
    length = batch.lengths[-2] + batch.tokens - end
    return rebuilt(
        batch, labels=labels, cu_seqlens=(*batch.cu_seqlens[:-2], batch.tokens), lengths=(*batch.lengths[:-2], length)
    )


def labels_cross_the_border(batch: TokenBatch) -> TokenBatch:
    """Shifted over the row as a whole."""
    labels = batch.labels.clone()
    for end, length in zip(batch.cu_seqlens[1:-1], batch.lengths[1:], strict=True):
        if length:
            labels[end - 1] = batch.input_ids[end]
    return rebuilt(batch, labels=labels)


@pytest.mark.parametrize("broken", [one_document, positions_run_on, pads_join_the_last, labels_cross_the_border])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_comparison_sees_what_packing_can_get_wrong(
    backend: str, broken: Callable[[TokenBatch], TokenBatch]
) -> None:
    model, made = model_of(backend, position_embedding="learned"), documents()
    expected, batches = step(model, alone(made)), microbatches(made)
    assert not differs(expected, step(model, batches))
    assert differs(expected, step(model, [broken(batch) for batch in batches]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_comparison_sees_a_mean_of_row_means(backend: str) -> None:
    model, made = model_of(backend), documents()
    assert differs(step(model, alone(made)), step(model, microbatches(made), mean="rows"))
