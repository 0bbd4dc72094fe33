"""Blocks streamed on ranks that share the tokens: the plain gradients, the same bits in turn, few exchanges."""

from __future__ import annotations

from itertools import product

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
            found, exchanges = of_rank[number]
            assert_close({name: x / 3 for name, x in found.items()}, expected)
            assert_equal(other[number][0], found)
            assert other[number][1] == exchanges


def test_a_block_exchanges_four_times_a_chunk_and_once_more_for_keys(ranks: RankPool) -> None:
    """Two there, two back; a chunk whose keys a later row has made anew sends none of its own."""
    chunks = 6
    one_layer = Way(model=VARIANTS["llama"] | dict(num_layers=1))
    for of_rank in ranks.run(gradients, 2, 2, 2, [one_layer], True):
        assert of_rank[0][1] == 4 * chunks + (chunks - 1)
