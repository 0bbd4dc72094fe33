"""Incremental decoding equals the full forward, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freight.nn.block import PlainRunner
from freight.nn.decode import DecodeCache, decoding
from freight.nn.loss_head import LogitsHead
from freight.ops.batch import TokenBatch
from tests.nn.small_decoders import VARIANTS, build

SEQUENCE = [1, 5, 2, 9, 30, 4, 4, 7, 11, 3]


@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_cached_logits_equal_the_full_forward(changes: dict[str, Any], first: int) -> None:
    model, arch = build(**changes)
    full = model(TokenBatch.from_documents([SEQUENCE]), LogitsHead(softcap=arch.final_softcap)).detach()
    with decoding(model, len(SEQUENCE)) as next_logits:
        got = [next_logits(SEQUENCE[:first])] + [next_logits([token]) for token in SEQUENCE[first:]]
    torch.testing.assert_close(torch.stack(got), full[first - 1 :], rtol=1e-9, atol=1e-12)


def test_pieces_of_several_tokens_equal_the_full_forward() -> None:
    model, arch = build(**VARIANTS["gemma2"])
    full = model(TokenBatch.from_documents([SEQUENCE]), LogitsHead(softcap=arch.final_softcap)).detach()
    with decoding(model, len(SEQUENCE)) as next_logits:
        got = [next_logits(SEQUENCE[a:b]) for a, b in [(0, 3), (3, 7), (7, 10)]]
    torch.testing.assert_close(torch.stack(got), full[[2, 6, 9]], rtol=1e-9, atol=1e-12)


def test_decoding_leaves_the_model_as_it_was() -> None:
    model, _ = build()
    model.train()
    with decoding(model, 4) as next_logits:
        assert not next_logits([1, 2]).requires_grad
        assert not model.training
    assert model.training
    assert all(isinstance(block.runner, PlainRunner) for block in model.blocks)


def test_a_full_cache_says_so() -> None:
    with pytest.raises(ValueError, match="holds 3 tokens; 4 do not fit"):
        DecodeCache(3).batch([1, 2, 3, 4])
