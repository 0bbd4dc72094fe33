"""From a process to a rank: environment, device and process group. The only file that reads the environment.

torchrun's variables say which rank this is; without them the process is a world of one, on the same code path. One
process is all that this version runs: a larger world is refused before any group exists.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from freight import __version__
from freight.errors import ConfigError

PACKAGES = ("torch", "transformers", "safetensors", "gguf", "datasets", "pyarrow", "pydantic", "numpy")
REPORTED_VARIABLES = ("OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")


@dataclass(frozen=True)
class World:
    """Where this process stands.

    Args:
        rank: Of `size` processes.
        size: Number of processes.
        device: Where it computes.
    """

    rank: int
    size: int
    device: torch.device


def world_from(variables: Mapping[str, str]) -> World:
    """Read torchrun's variables.

    Raises:
        ConfigError: A variable is not a number, or there is more than one process.
    """
    numbers = {}
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        value = variables.get(name, default)
        if not value.isdigit():
            raise ConfigError(f"`{name}` must be a number; got {value!r}. Unset it, or start with torchrun.")
        numbers[name] = int(value)
    if numbers["WORLD_SIZE"] != 1:
        raise ConfigError(
            f"Training runs in one process in this version; WORLD_SIZE is {numbers['WORLD_SIZE']}. "
            "Start it once, without torchrun: freight train CONFIG."
        )
    device = torch.device("cuda", numbers["LOCAL_RANK"]) if torch.cuda.is_available() else torch.device("cpu")
    return World(numbers["RANK"], numbers["WORLD_SIZE"], device)


@contextmanager
def launched() -> Iterator[World]:
    """Read the environment and hold a default process group while entered; an existing group is used as it is.

    Raises:
        ConfigError: As `world_from`.
    """
    world = world_from(os.environ)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if dist.is_initialized():
        yield world
        return
    # Saved state is gathered by gloo on any device. A world of one needs no rendezvous, so no port and no file.
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
    try:
        yield world
    finally:
        dist.destroy_process_group()


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
