"""Whose failure it was: this rank's own, or that of a rank which is gone."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from freight.errors import CheckpointError, DataError, OffloadError
from freight.train.rank_failures import _from_a_lost_peer


@pytest.mark.parametrize(
    "error",
    [
        OffloadError("`offload.directory` /mnt/store: No space left on device."),
        CheckpointError("/data/peer-review/checkpoints/step-000010 is damaged."),
        DataError("b.jsonl line 6: field `text` is null"),
        ValueError("connection"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_own_words_are_not_taken_for_a_lost_peer(error: Exception) -> None:
    assert not _from_a_lost_peer(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4711"), dist.DistError("the group is gone")],
)
def test_a_collective_that_breaks_is(error: Exception) -> None:
    assert _from_a_lost_peer(error)
