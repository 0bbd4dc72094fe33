"""Process groups for ranks that no launcher started: a benchmark's own processes on one machine.

They meet in a file, so neither a port nor an environment is needed. A silent group has the same ranks and moves
nothing: what then remains of a step's time is its computing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from freight.parallel.mesh import Axis, build_mesh


@contextmanager
def local_group(meeting: Path, rank: int, world: int, timeout_seconds: float) -> Iterator[DeviceMesh]:
    """Hold a default gloo group while entered.

    Args:
        meeting: A file that does not exist yet, the same for all ranks.
        rank: Of `world` processes.
        world: All of them share the tokens of a microbatch.
        timeout_seconds: Of every collective.

    Yields:
        The mesh of `build_mesh`.

    **Communication**: creates the groups of the mesh.
    """
    store = dist.FileStore(str(meeting), world)  # pyright: ignore[reportPrivateImportUsage]
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        yield build_mesh(world, context=world)
    finally:
        dist.destroy_process_group()


def silent_mesh(world: int) -> DeviceMesh:
    """The mesh of `local_group` over groups that move nothing: what is received is whatever memory holds.

    Args:
        world: As there; the default group must exist.
    """
    # Importing it makes the backend known.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401, PLC0415

    sizes = {axis: world if axis == Axis.CP else 1 for axis in Axis}
    silent: dict[Any, Any] = {axis.value: "fake" for axis in Axis}
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=silent)
