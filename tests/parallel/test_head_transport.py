"""Tokens against heads and back: right tokens, right heads, sums of what several ranks hold."""

from __future__ import annotations

import pytest
import torch

from freight.parallel.head_split import HeadShare
from freight.parallel.head_transport import UlyssesTransport
from freight.verify.ranks import RankPool
from tests.parallel.transport_tasks import round_trips

CASES = [(8, 4), (4, 4), (4, 1), (9, 3), (12, 3), (6, 2)]


@pytest.mark.parametrize("world", [2, 4])
def test_chunks_arrive_in_order_and_go_home(ranks: RankPool, world: int) -> None:
    """The last chunk is one token per rank. Gradients of a key-value head come home as the sum over its copies."""
    of_ranks = ranks.run(round_trips, world, CASES, 4 * world)
    for number, (heads, groups) in enumerate(CASES):
        copies = torch.zeros(groups)
        for results in of_ranks:
            share: HeadShare = results[number]["share"]
            shared = heads // groups
            uses = torch.tensor([head // shared for head in range(*share.queries)])
            copies += torch.bincount(uses, minlength=groups) if results[number]["num_keys"] == len(uses) else 0
            if results[number]["num_keys"] != len(uses):
                copies[share.keys[0] : share.keys[1]] += 1
            q, k, v = results[number]["arrived"]
            tokens = 100.0 * torch.arange(q.shape[0]).view(-1, 1)
            assert results[number]["first_head"] == share.queries[0]
            assert torch.equal(q, tokens + torch.arange(*share.queries))
            wanted = tokens + (uses if results[number]["num_keys"] == len(uses) else torch.arange(*share.keys))
            assert torch.equal(k, wanted) and torch.equal(v, -wanted)
        for results in of_ranks:
            q, k, v = results[number]["returned"]
            sent_q, sent_k = results[number]["sent"]
            assert torch.equal(q, (sent_q % 100).to(torch.bfloat16))
            total = sent_k.to(torch.bfloat16).float() * copies
            assert torch.allclose(k.float(), total, rtol=2**-7) and torch.allclose(v.float(), -total, rtol=2**-7)


def test_one_rank_moves_nothing() -> None:
    transport = UlyssesTransport(4, 2, None)
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    there = transport.scatter_heads(q, k, k, kv=2)
    assert there[0] is q and there[1] is k
    assert transport.gather_heads(q)[0] is q and transport.size == 1 and transport.first_head == 0
