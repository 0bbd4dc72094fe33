"""The rank pool: results by rank, errors in the rank's own words, and life after a hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from freight.verify.ranks import RankError, RankPool


def total(base: int) -> tuple[int, int, float, int]:
    value = torch.tensor(float(dist.get_rank() + base))
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value.item(), torch.get_num_threads()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("bad line 3")
    dist.barrier()


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def test_ranks_share_a_group_of_the_size_asked_for(ranks: RankPool) -> None:
    assert ranks.run(total, 2, 10) == [(0, 2, 21.0, 1), (1, 2, 21.0, 1)]
    assert ranks.run(total, 1, 10) == [(0, 1, 10.0, 1)]


def test_world_beyond_the_pool_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="1 to 4"):
        ranks.run(total, 5, 0)


def test_failure_names_the_rank_and_its_words_and_the_pool_lives_on() -> None:
    with RankPool(2, timeout_seconds=60) as pool:
        with pytest.raises(RankError, match=r"(?s)rank 1: .*bad line 3"):
            pool.run(fail_on_one, 2)
        with pytest.raises(RankError, match=r"ranks \[1\] did not finish within 10 s"):
            pool.run(hang_on_one, 2, timeout_seconds=10)
        with pytest.raises(RankError, match=r"rank 1: the process died"):
            pool.run(die_on_one, 2)
        assert [result[:3] for result in pool.run(total, 2, 0)] == [(0, 2, 1.0), (1, 2, 1.0)]
