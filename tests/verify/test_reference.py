"""The reference itself: against an oracle that goes token by token, and against torch's AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freight.config.load import config_from
from freight.config.model import architecture_of
from freight.config.schema import OptimizerConfig, TrainConfig
from freight.ops.batch import IGNORE_INDEX
from freight.verify.case import Case, drawn_weights, small_documents
from freight.verify.reference import Adam, streams
from freight.verify.reference_decoder import Placed, PlainDecoder
from freight.verify.tolerances import close
from tests.nn.small_decoders import VARIANTS, build
from tests.oracles.decoder import reference_loss
from tests.verify.small_configs import raw_config

TRAIN = TrainConfig(optimizer=OptimizerConfig(lr=1e-3))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_decoder_is_the_oracle(name: str) -> None:
    model, arch = build(**VARIANTS[name])
    weights = {key: parameter.detach().clone().requires_grad_() for key, parameter in model.named_parameters()}
    ids = [3, 1, 4, 1, 5, 9, 2]
    wanted = reference_loss(arch, weights, [ids])
    labels = torch.tensor([*ids[1:], IGNORE_INDEX])
    _, nll = PlainDecoder(arch, None, weights).losses(Placed(torch.tensor(ids), labels, 0), TRAIN, lambda *_: None)
    assert close(nll.sum(), wanted)
    asked = list(weights.values())
    for x, y in zip(torch.autograd.grad(nll.sum(), asked), torch.autograd.grad(wanted, asked), strict=True):
        assert close(x, y)


def test_what_is_minimised_has_smoothing_and_the_z_loss() -> None:
    model, arch = build()
    decoder = PlainDecoder(arch, None, dict(model.named_parameters()))
    train = TRAIN.model_copy(update={"label_smoothing": 0.1, "z_loss_coeff": 0.01})
    place = Placed(torch.tensor([3, 1]), torch.tensor([1, IGNORE_INDEX]), 0)
    objective, nll = decoder.losses(place, train, lambda *_: None)
    logits = decoder._logits(place, lambda *_: None)
    smoothed = torch.nn.functional.cross_entropy(logits[:1], torch.tensor([1]), label_smoothing=0.1)
    assert close(objective[0], smoothed + 0.01 * logits[0].logsumexp(0) ** 2)
    assert close(nll[0], torch.nn.functional.cross_entropy(logits[:1], torch.tensor([1])))
    assert objective[1] == nll[1] == 0


def test_adam_is_that_of_torch() -> None:
    config = OptimizerConfig(lr=0.01, weight_decay=0.2)
    start = {"matrix": torch.randn(3, 4).double(), "norm": torch.randn(4).double()}
    mine, own = dict(start), Adam(config)
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    groups = [{"params": [theirs["matrix"]], "weight_decay": 0.2}, {"params": [theirs["norm"]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=config.betas, eps=config.eps)
    for step in range(4):
        gradients = {name: (step + 1) * torch.sin(7 * value + step) for name, value in start.items()}
        mine |= own.updated(mine, gradients)
        for name, parameter in theirs.items():
            parameter.grad = gradients[name]
        optimizer.step()
        for name, parameter in theirs.items():
            assert close(mine[name], parameter)


def case_of(**sections: Any) -> Case:
    """Rows of 16 tokens, three of them a step."""
    raw = raw_config(**sections)
    raw["data"] |= {"sequence_length": 16, "packing": {"document_multiple": 2}}
    raw["train"] |= {"global_batch_size": 3, "micro_batch_tokens": 32, "steps": 3}
    config = config_from(raw)
    return Case(config, architecture_of(config.model), small_documents(config, 64, 9), data_ranks=2)


def test_streams_are_the_loaders_microbatches() -> None:
    case = case_of()
    of_reference = {(stream.step, stream.microbatch): stream for stream in streams(case)}
    seen = 0
    for rank in range(2):
        for data in case.loader(rank):
            for batch in data.microbatches:
                stream = of_reference[batch.step, batch.microbatch]
                assert stream.tokens == batch.tokens
                assert [(d.start, len(d.ids)) for d in stream.documents] == list(batch.spans)
                for document in stream.documents:
                    rows = slice(document.start, document.start + len(document.ids))
                    assert torch.equal(document.ids, batch.input_ids[rows])
                    assert torch.equal(document.labels, batch.labels[rows])
                seen += 1
    assert seen == len(of_reference) == 6


def test_documents_are_uneven_and_some_have_no_label() -> None:
    documents = case_of().documents
    assert len({len(document) for document in documents}) > 5
    assert any(not document.num_targets for document in documents if len(document) > 3)


def test_the_weights_of_both_sides_are_drawn_in_float32() -> None:
    start = drawn_weights(case_of(adapter={"type": "lora", "rank": 4}))
    assert {value.dtype for value in start.weights.values()} == {torch.float32}
    assert all(".lora_" in name for name in start.trained) and start.trained < start.weights.keys()
