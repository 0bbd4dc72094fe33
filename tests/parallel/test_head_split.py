"""Heads over ranks: every head once, key-value heads where they are needed, for any number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import ConfigError
from freight.parallel.head_split import HeadSplit, replicated

heads_and_groups = st.integers(1, 8).flatmap(
    lambda groups: st.tuples(st.integers(1, 6).map(lambda per: per * groups), st.just(groups))
)


@settings(max_examples=200)
@given(shape=heads_and_groups, ranks=st.integers(1, 16), portions=st.integers(1, 4))
def test_every_head_is_somewhere_with_its_keys(shape: tuple[int, int], ranks: int, portions: int) -> None:
    heads, groups = shape
    ranks = min(ranks, heads)
    split = HeadSplit(heads, groups, ranks)
    sizes = [share.num_queries for share in split.shares]
    assert max(sizes) - min(sizes) <= 1
    of_portions = split.portions(portions)
    assert 1 <= len(of_portions) <= portions
    for rank in range(ranks):
        parts = [shares[rank] for shares in of_portions]
        assert all(part.num_queries and part.num_keys for part in parts)
        queries = [head for part in parts for head in range(*part.queries)]
        keys = [head for part in parts for head in range(*part.keys)]
        assert queries == list(range(*split.shares[rank].queries)), "portions have no head twice"
        assert keys == list(range(*split.shares[rank].keys))
        for part in parts:
            needed = [head // (heads // groups) for head in range(*part.queries)]
            assert sorted(set(needed)) == list(range(*part.keys)), "exactly the key-value heads that are used"
            runs = split.runs(part)
            if runs is None:
                assert part.num_queries % part.num_keys == 0
            uses = runs or [part.num_queries // part.num_keys] * part.num_keys
            assert [part.keys[0] + i for i, run in enumerate(uses) for _ in range(run)] == needed
    assert [head for share in split.shares for head in range(*share.queries)] == list(range(heads))
    copies = sum(share.num_keys for share in split.shares)
    assert replicated(split.shares) == (copies > groups)


def test_published_numbers_of_copies() -> None:
    """32/8 heads on 16 ranks send 16 copies, 12/3 on 4 send 6; 6/2 on 4 needs no repeating, 12/3 does."""
    assert sum(share.num_keys for share in HeadSplit(32, 8, 16).shares) == 16
    assert sum(share.num_keys for share in HeadSplit(12, 3, 4).shares) == 6
    assert all(HeadSplit(6, 2, 4).runs(share) is None for share in HeadSplit(6, 2, 4).shares)
    assert [HeadSplit(12, 3, 4).runs(share) for share in HeadSplit(12, 3, 4).shares] == [None, (1, 2), (2, 1), None]


def test_fewer_heads_than_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`parallel.context` 8 .* needs at least 8 query heads .* there are 4"):
        HeadSplit(4, 2, 8)
