"""Rows of ranks under a stream: queries of the row, keys of the whole chunk, gradients summed over rows."""

from __future__ import annotations

import pytest
import torch

from freight.verify.ranks import RankPool
from tests.parallel.transport_tasks import row_trips


@pytest.mark.parametrize("row", [1, 2])
def test_queries_of_the_row_meet_keys_of_the_chunk(ranks: RankPool, row: int) -> None:
    for of_rank in ranks.run(row_trips, 4, 4, 2, row, 16):
        for (start, stop), chunk in zip([(0, 16), (16, 24)], of_rank, strict=True):
            queries = torch.cat([torch.arange(*piece) for piece in chunk["pieces"]])
            assert len(queries) == (stop - start) * row // 4, "a row's share"
            q, k, v = chunk["there"]
            assert torch.equal(q, 100.0 * queries.view(-1, 1) + torch.arange(*chunk["share"].queries))
            wanted = 100.0 * torch.arange(start, stop).view(-1, 1) + torch.arange(*chunk["share"].keys)
            assert torch.equal(k, wanted) and torch.equal(v, -wanted)
            dq, dk, dv = chunk["back"]
            sent_q, sent_k = chunk["sent"]
            rows = 4 // row
            assert torch.equal(dq, sent_q) and torch.equal(dk, rows * sent_k) and torch.equal(dv, -rows * sent_k)
