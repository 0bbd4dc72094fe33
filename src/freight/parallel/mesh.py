"""The device mesh: one name per axis, one place where all process groups are made.

A single process is a world of one on the same mesh: every axis has size 1, nothing else differs. Axes that split
computation (pp, cp, tp) have size 1 in this version; the data axis takes the whole world.
"""

from __future__ import annotations

from enum import StrEnum

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Axis(StrEnum):
    """Mesh axes, outermost first: neighbouring ranks share tp, then cp."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"


def build_mesh(world: int, device_type: str = "cpu") -> DeviceMesh:
    """Build the mesh of all ranks; the default process group must exist.

    Args:
        world: Number of processes; all of them on the data axis.
        device_type: `cpu` or `cuda`.

    Returns:
        A mesh with the five axes of `Axis`.

    **Communication**: creates the groups of all axes, in one order on all ranks.
    """
    sizes = {axis: 1 for axis in Axis} | {Axis.DP_SHARD: world}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def data_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The axis over which microbatches, parameters, gradients and optimizer state are split."""
    return mesh[Axis.DP_SHARD]
