"""Sums over the mesh: label counts, losses, and the one global gradient norm.

Every distinct gradient element counts once: shards are summed over the axes they are split on, replicas are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from freight.parallel.mesh import batch_axis, data_axis


def sum_over_data(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum a tensor over the data axis, context ranks included, in place.

    **Communication**: one all-reduce over dp_shard x cp of the tensor's bytes; none on one rank.
    """
    axis = data_axis(mesh)
    if axis.size() > 1:
        dist.all_reduce(value, group=axis.get_group())
    return value


def sum_over_batches(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum over the ranks that work on different microbatches, in place: what context ranks have in common counts once.

    **Communication**: one all-reduce over dp_shard of the tensor's bytes; none on one rank.
    """
    axis = batch_axis(mesh)
    if axis.size() > 1:
        dist.all_reduce(value, group=axis.get_group())
    return value


def global_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """`sqrt(sum g^2)` over distinct elements; the same scalar on all ranks.

    Args:
        parameters: Plain or DTensor; those without a gradient are passed over.

    Returns:
        float32 scalar (float64 for float64 gradients), on the parameters' device. 0 if there is no gradient.

    **Communication**: one all-reduce of one scalar per sharded axis.
    """
    groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            groups[_sharded_over(parameter.grad)].append(local(parameter.grad))
    squares = []
    for process_groups, gradients in groups.items():
        square = nn.utils.get_total_norm(gradients).square()
        for process_group in process_groups:
            dist.all_reduce(square, group=process_group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients in place."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_over(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(tensor.placements)
        if placement.is_shard() and mesh.size(dim) > 1
    )
