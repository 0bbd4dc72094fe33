"""Layouts of the packing benchmark: every one has the same documents, labels and loss; only the padding differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freight.bench import padding_layouts as layouts
from freight.bench.options import chosen_options
from freight.bench.padding_layouts import Layout
from freight.config.architecture import Architecture
from freight.config.presets import preset
from freight.data.documents import Document, InMemoryDocuments, make_document
from freight.data.pack.document_rows import DocumentRows
from freight.errors import ConfigError
from freight.nn.decoder import Decoder
from freight.nn.init import init_weights

PACK_SIZE = 32


@pytest.fixture(scope="module")
def arch() -> Architecture:
    return preset("debug")


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    generator = np.random.default_rng(0)
    lengths = (9, 3, 14, 5, 1, 12, 19)
    return [make_document(generator.integers(0, 512, n), generator.random(n) < 0.6) for n in lengths]


@pytest.fixture(scope="module")
def sides(documents: list[Document]) -> dict[str, Layout]:
    rows = DocumentRows(InMemoryDocuments(documents), "first_fit_shuffle", PACK_SIZE)
    return {
        "packed": layouts.packed([rows.row(0, 0, n) for n in range(rows.num_rows)], PACK_SIZE),
        "unpacked": layouts.unpacked(documents, PACK_SIZE),
        "padded": layouts.padded(documents, PACK_SIZE),
        "longest": layouts.padded_to_longest(documents, 3),
        "grouped": layouts.grouped_by_length(documents, 3),
    }


def test_every_layout_has_the_same_loss(arch: Architecture, sides: dict[str, Layout]) -> None:
    model = Decoder(arch).double()
    init_weights(model, 0)
    with torch.no_grad():
        losses = {name: sum(float(model(batch).nll) for batch in layout.microbatches) for name, layout in sides.items()}
    assert len({round(loss, 9) for loss in losses.values()}) == 1, losses


def test_tokens_computed_are_those_of_the_layout(documents: list[Document], sides: dict[str, Layout]) -> None:
    computed = {name: sum(batch.tokens for batch in layout.microbatches) for name, layout in sides.items()}
    real = sum(map(len, documents))
    assert computed["padded"] == computed["unpacked"] == PACK_SIZE * len(documents)
    assert computed["packed"] == PACK_SIZE * -(-real // PACK_SIZE)
    assert computed["longest"] == 3 * 14 + 3 * 12 + 19
    assert computed["grouped"] == 3 * 5 + 3 * 14 + 19


def test_pads_of_a_padded_layout_are_attended_and_of_the_others_are_not(sides: dict[str, Layout]) -> None:
    assert sides["padded"].attended == [PACK_SIZE] * 7
    assert sorted(filter(None, sides["packed"].attended)) == sorted(sides["unpacked"].attended[::2])
    assert all(batch.real_tokens == batch.tokens for batch in sides["longest"].microbatches)


def test_executed_flops_count_what_ran(arch: Architecture, documents: list[Document], sides: dict[str, Layout]) -> None:
    executed = {name: layouts.executed_flops(arch, layout) for name, layout in sides.items()}
    useful = layouts.useful_flops(arch, documents, sides["packed"])
    assert useful < executed["packed"] < executed["grouped"] < executed["longest"] < executed["padded"]
    assert executed["unpacked"] < executed["padded"]  # the same linears, no attention to pads


@pytest.mark.parametrize("options", [{"reapeats": 3}, {"repeats": "three"}])
def test_an_option_that_is_not_one_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"repeats"):
        chosen_options(options, {"repeats": 5, "seconds": 1.0})
