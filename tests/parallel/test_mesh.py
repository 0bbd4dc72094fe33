"""Axes: who shares parameters, who shares microbatches, who shares tokens."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from freight.errors import ConfigError
from freight.parallel.gradients import sum_over_data
from freight.parallel.mesh import Axis, batch_axis, build_mesh, context_axes, data_axis
from freight.verify.ranks import RankPool


def axes() -> dict[str, object]:
    mesh = build_mesh(4, context=2)
    rows, row = context_axes(build_mesh(4, context=4), 2)
    return {
        "sum": int(sum_over_data(torch.tensor(10 ** dist.get_rank()), mesh)),
        "sizes": (data_axis(mesh).size(), batch_axis(mesh).size(), mesh[Axis.CP].size()),
        "places": (data_axis(mesh).get_local_rank(), batch_axis(mesh).get_local_rank(), mesh[Axis.CP].get_local_rank()),
        "across": dist.get_process_group_ranks(rows.get_group()),
        "within": dist.get_process_group_ranks(row.get_group()),
    }


def test_context_ranks_are_neighbours_and_count_as_data(ranks: RankPool) -> None:
    found = ranks.run(axes, 4)
    assert all(of["sum"] == 1111 and of["sizes"] == (4, 2, 2) for of in found)
    assert [of["places"] for of in found] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert [of["across"] for of in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [of["within"] for of in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("context", [0, 3, 8])
def test_context_must_divide_the_processes(context: int) -> None:
    with pytest.raises(ConfigError, match=f"`parallel.context` {context} must divide the 4 processes. Use 1, 2 or 4."):
        build_mesh(4, context=context)
