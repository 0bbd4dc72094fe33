"""From a process to a rank: environment, device and process group. The only file that reads the environment.

torchrun's variables say which rank this is; without them the process is a world of one, on the same code path.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from freight import __version__
from freight.errors import ConfigError, FreightError

PACKAGES = ("torch", "transformers", "safetensors", "gguf", "datasets", "pyarrow", "pydantic", "numpy")
REPORTED_VARIABLES = ("OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Where this process stands.

    Args:
        rank: Of `size` processes.
        size: Number of processes.
        device: Where it computes.
        ranks_per_node: Processes on this machine.
    """

    rank: int
    size: int
    device: torch.device
    ranks_per_node: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and speaks to people."""
        return self.rank == 0

    def on_first(self, function: Callable[[], T]) -> T:
        """What a function gives on the first rank, on all ranks; its fault is raised on all of them.

        Args:
            function: Quick, since the others wait in a collective; its result can be pickled.

        **Communication**: one broadcast of the result, if there are several ranks.
        """
        if self.size == 1:
            return function()
        answer: list[Any] = [None, None]
        if self.first:
            try:
                answer[0] = function()
            except FreightError as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def largest(self, value: int) -> int:
        """The largest of all ranks' values.

        **Communication**: one all-reduce of a number, if there are several ranks.
        """
        if self.size == 1:
            return value
        number = torch.tensor(value, device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def saving_group(self) -> dist.ProcessGroup | None:
        """A group for writing saved state beside the training step; None for one rank.

        **Communication**: creates the group; call it on all ranks alike.
        """
        if self.size == 1:
            return None
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        return group

    def gather(self, value: T) -> list[T]:
        """All ranks' values, in order of rank.

        **Communication**: one all-gather of what pickle makes of them, if there are several ranks.
        """
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values


def world_from(variables: Mapping[str, str]) -> World:
    """Read torchrun's variables.

    Raises:
        ConfigError: A variable is not a number.
    """
    numbers = {}
    for name, default in VARIABLES.items():
        value = variables.get(name, default)
        if not value.isdigit():
            raise ConfigError(f"`{name}` must be a number; got {value!r}. Unset it, or start with torchrun.")
        numbers[name] = int(value)
    if not numbers["RANK"] < numbers["WORLD_SIZE"]:
        raise ConfigError(
            f"`RANK` {numbers['RANK']} must be below `WORLD_SIZE` {numbers['WORLD_SIZE']}. Unset both, or start with "
            "torchrun."
        )
    device = torch.device("cuda", numbers["LOCAL_RANK"]) if torch.cuda.is_available() else torch.device("cpu")
    return World(numbers["RANK"], numbers["WORLD_SIZE"], device, numbers["LOCAL_WORLD_SIZE"])


def this_world() -> World:
    """Where this process stands, from its environment.

    Raises:
        ConfigError: As `world_from`.
    """
    return world_from(os.environ)


@contextmanager
def launched(timeout_seconds: int = 600) -> Iterator[World]:
    """Read the environment and hold a default process group while entered; an existing group is used as it is.

    Args:
        timeout_seconds: After which a rank that waits for others gives up.

    Raises:
        ConfigError: As `world_from`.
    """
    world = this_world()
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if dist.is_initialized():
        yield replace(world, rank=dist.get_rank(), size=dist.get_world_size())
        return
    # Saved state is gathered by gloo on any device. A world of one needs no rendezvous, so no port and no file.
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    store = dist.HashStore() if world.size == 1 else None  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout_seconds)
    )
    try:
        yield world
    finally:
        dist.destroy_process_group()


def device_bytes(device: torch.device) -> int | None:
    """Memory of the device that computes; None if it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return _memory_bytes()


def free_host_bytes() -> int | None:
    """Memory of this machine that programs can still take, caches that the system would give up included."""
    try:
        with Path("/proc/meminfo").open() as lines:
            kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return int(kibibytes) * 1024


def environment() -> dict[str, Any]:
    """Versions, devices and threads, for `freight env`, bug reports and the run folder."""
    return {
        "freight": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": _memory_bytes(),
        "gpus": [
            {"name": properties.name, "memory_bytes": properties.total_memory}
            for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ],
        "cuda": torch.version.cuda,
        "variables": {name: os.environ[name] for name in REPORTED_VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
