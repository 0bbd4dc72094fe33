"""Blocks streamed on ranks that share the tokens: the plain gradients, the same bits in turn, few exchanges."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from freight.nn.block import PlainRunner
from freight.verify.ranks import RankPool
from tests.memory import running
from tests.memory.running import assert_close, assert_equal
from tests.nn.small_decoders import VARIANTS
from tests.parallel.streamed_tasks import Way, gradients

WAYS = [
    *(Way(kept, kv, VARIANTS["llama"]) for kept, kv in product(("none", "context", "all"), ("device", "offload"))),
    *(Way(kept, model=VARIANTS["qwen2"], lengths=(7, 20, 3, 14)) for kept in ("none", "context", "all")),
    Way(kv="offload", model=VARIANTS["gemma2"], lengths=(30, 11)),
    Way("none", model=dict(attention_dropout=0.4, num_query_groups=2), lengths=(41,)),
    *(Way(kept, model=VARIANTS["llama"], trained=("mlp",)) for kept in ("none", "context")),
]


@pytest.mark.parametrize(("count", "row"), [(2, 2), (2, 1), (4, 2)])
def test_gradients_are_the_plain_ones_and_overlap_changes_no_bit(ranks: RankPool, count: int, row: int) -> None:
    overlapped, in_turn = (ranks.run(gradients, count, count, row, WAYS, overlap) for overlap in (True, False))
    for number, way in enumerate(WAYS):
        model, batch = way.build()
        expected = running.gradients(model, PlainRunner(), batch)
        assert len(expected) > 1
        for of_rank, other in zip(overlapped, in_turn, strict=True):
            found = of_rank[number]
            assert_close({name: x / 3 for name, x in found.gradients.items()}, expected)
            assert_equal(other[number].gradients, found.gradients)
            assert other[number].exchanges == found.exchanges
            assert other[number].most == 1 and found.most >= 2, way


@pytest.mark.parametrize(("kept", "of_chunk", "of_keys"), [("context", 4, 1), ("none", 6, 1), ("all", 4, 0)])
def test_a_block_exchanges_heads_so_often(ranks: RankPool, kept: Any, of_chunk: int, of_keys: int) -> None:
    """Two there and two back, two more where attention runs again, one where keys are made anew for a later chunk."""
    chunks = 6
    one_layer = Way(kept, model=VARIANTS["llama"] | dict(num_layers=1))
    for (seen,) in ranks.run(gradients, 2, 2, 2, [one_layer], True):
        assert seen.exchanges == of_chunk * chunks + of_keys * (chunks - 1)
