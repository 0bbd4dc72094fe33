"""The device mesh: one name per axis, one place where all process groups are made.

A single process is a world of one on the same mesh: every axis has size 1, nothing else differs. Ranks of the context
axis hold different tokens of the same microbatches and the same parameters, so parameters are sharded over data and
context together: it costs nothing, and gradients and label counts are summed over both at once.
"""

from __future__ import annotations

from enum import StrEnum

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from freight.errors import ConfigError


class Axis(StrEnum):
    """Mesh axes, outermost first: neighbouring ranks share tp, then cp."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"


DATA_AND_CONTEXT = "dp_shard_cp"
CONTEXT_ROWS, CONTEXT_ROW = "cp_rows", "cp_row"


def build_mesh(world: int, device_type: str = "cpu", *, context: int = 1) -> DeviceMesh:
    """Build the mesh of all ranks; the default process group must exist.

    Args:
        world: Number of processes.
        device_type: `cpu` or `cuda`.
        context: Ranks that share the tokens of a microbatch; the data axis takes the rest.

    Returns:
        A mesh with the five axes of `Axis`.

    Raises:
        ConfigError: The ranks cannot be dealt out.

    **Communication**: creates the groups of all axes, in one order on all ranks.
    """
    if context < 1 or world % context:
        *some, last = [str(n) for n in range(1, world + 1) if world % n == 0]
        fitting = f"{', '.join(some)} or {last}" if some else last
        raise ConfigError(f"`parallel.context` {context} must divide the {world} processes. Use {fitting}.")
    sizes = {axis: 1 for axis in Axis} | {Axis.DP_SHARD: world // context, Axis.CP: context}
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if context > 1:
        mesh[(Axis.DP_SHARD, Axis.CP)]._flatten(DATA_AND_CONTEXT)
    return mesh


def data_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The axis over which parameters, gradients and optimizer state are split, and over which losses are summed.

    Its ranks hold different tokens: other microbatches, or other parts of the same ones.
    """
    if mesh[Axis.CP].size() == 1:
        return mesh[Axis.DP_SHARD]
    return mesh[(Axis.DP_SHARD, Axis.CP)]._flatten(DATA_AND_CONTEXT)  # the one that `build_mesh` made


def batch_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The axis over which microbatches are dealt out; ranks of the context axis get the same ones."""
    return mesh[Axis.DP_SHARD]


def context_axes(mesh: DeviceMesh, row: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The context axis as rows of neighbouring ranks.

    Args:
        mesh: Of `build_mesh`.
        row: Ranks in a row; divides the context axis.

    Returns:
        The axis across rows, and the axis within a row.

    **Communication**: creates the groups of both axes; call it once, in one order on all ranks.
    """
    context = mesh[Axis.CP]
    split = context._unflatten(0, (context.size() // row, row), (CONTEXT_ROWS, CONTEXT_ROW))
    return split[CONTEXT_ROWS], split[CONTEXT_ROW]
