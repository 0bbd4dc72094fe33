"""Gradient norm and clipping: every distinct element once, whatever the mesh."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from freight.parallel.gradients import global_grad_norm, scale_gradients, sum_over_data
from freight.parallel.mesh import Axis, build_mesh, data_axis
from freight.verify.ranks import RankPool


def with_gradient(values: list[float]) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def distributed(values: list[float], mesh: DeviceMesh, placement: Shard | Replicate) -> nn.Parameter:
    """A parameter whose local gradient on this rank is `values`."""
    local = torch.tensor(values)
    parameter = nn.Parameter(DTensor.from_local(torch.zeros_like(local), mesh, [placement]))
    parameter.grad = DTensor.from_local(local, mesh, [placement])
    return parameter


def norms_on_two_ranks() -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank = mesh.get_local_rank()
    replicated = distributed([0.8], mesh, Replicate())
    split = distributed([[3.0], [4.0]][rank], mesh, Shard(0))
    common = distributed([12.0], mesh, Replicate())
    return {
        "replicated": global_grad_norm([replicated]).item(),
        "split and replicated": global_grad_norm([split, common]).item(),
    }


def summed_over_data() -> tuple[int, int]:
    mesh = build_mesh(2)
    return int(sum_over_data(torch.tensor(3 + mesh.get_rank()), mesh)), data_axis(mesh).size()


def test_replicas_count_once_and_shards_add_up(ranks: RankPool) -> None:
    for norms in ranks.run(norms_on_two_ranks, 2):
        assert norms == pytest.approx({"replicated": 0.8, "split and replicated": 13.0}, abs=1e-6)


def test_counts_are_summed_over_the_data_axis(ranks: RankPool) -> None:
    assert ranks.run(summed_over_data, 2) == [(7, 2), (7, 2)]


def test_norm_of_plain_parameters_and_of_none() -> None:
    assert global_grad_norm([with_gradient([3.0]), nn.Parameter(torch.zeros(2)), with_gradient([4.0])]).item() == 5.0
    assert global_grad_norm([nn.Parameter(torch.zeros(2))]).item() == 0.0
    assert math.isnan(global_grad_norm([with_gradient([float("nan"), 1.0])]).item())


def test_gradients_are_scaled_in_place() -> None:
    parameter = with_gradient([1.0, -2.0])
    scale_gradients([parameter, nn.Parameter(torch.zeros(1))], 0.5)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.5, -1.0]


def test_mesh_has_all_axes_and_the_data_axis_takes_the_world(mesh: DeviceMesh) -> None:
    assert mesh.mesh_dim_names == tuple(Axis)
    assert mesh.size() == 1
    assert data_axis(mesh).mesh_dim_names == ("dp_shard",)
