"""An adapter's dropout counts tokens by their place in the stream: ranks and ranges drop what the whole would."""

from __future__ import annotations

import pytest
import torch

from freight.nn.lora import InputDropout
from freight.ops.batch import TokenBatch
from freight.ops.layout import SequenceLayout


@pytest.mark.parametrize("kind", ["contiguous", "zigzag_document"])
def test_ranks_drop_what_one_process_drops(kind: str) -> None:
    batch = TokenBatch.from_documents([list(range(9)), list(range(7))], seed=3, step=2)
    dropout = InputDropout("layers.0.attention.q_proj", 0.4)
    whole = dropout.factors(batch.range(), torch.ones(16, 8))
    assert 0.2 < (whole == 0).double().mean() < 0.6
    layout = SequenceLayout(kind, 16, 2, batch.cu_seqlens)
    for rank in range(2):
        part = batch.local(layout, rank)
        assert torch.equal(dropout.factors(part.range(), torch.ones(8, 8)), whole[layout.index(rank)])
        assert torch.equal(dropout.factors(part.range(3, 6), torch.ones(3, 8)), whole[layout.index(rank)[3:6]])
