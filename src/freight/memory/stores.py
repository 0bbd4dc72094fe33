"""Where runners keep tensors between forward and backward: on the device, in host memory, or on disk.

All tiers move bytes and never convert them, so results do not depend on the tier. Host and disk stores allocate their
slots once: a step allocates nothing there. The device tier just keeps what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor

from freight.memory.slots import Slab
from freight.memory.store_disk import DiskStore
from freight.memory.store_host import HostStore
from freight.ops.attention_math import working_dtype
from freight.ops.protocols import Key, TensorStore

__all__ = ["DeviceStore", "DiskStore", "HostStore", "Key", "Slab", "TensorStore", "Tier", "open_store"]

Tier = Literal["none", "host", "disk"]


class DeviceStore:
    """Keeps tensors where they are; a `TensorStore`."""

    on_device = True
    bytes_in = 0
    bytes_out = 0
    wait_seconds = 0.0

    def __init__(self) -> None:
        self._tensors: dict[Key, Tensor] = {}

    def put(self, key: Key, tensor: Tensor) -> None:
        """Keep it."""
        self._tensors[key] = tensor.detach()

    def prefetch(self, key: Key) -> None:
        """Nothing to do."""

    def get(self, key: Key) -> Tensor:
        """The tensor itself."""
        return self._tensors[key]

    def accumulate(self, key: Key, tensor: Tensor) -> None:
        """Add in place."""
        if key in self._tensors:
            self._tensors[key].add_(tensor)
        else:
            self._tensors[key] = tensor.to(working_dtype(tensor.dtype), copy=True)

    def lend(self, name: str, like: Tensor, rows: int) -> Tensor:
        """A new tensor."""
        return like.new_empty((rows, *like.shape[1:]))

    def holds(self, tensor: Tensor) -> bool:
        """No: what is lent is the device's."""
        return False

    def write(self, place: Tensor, value: Tensor) -> None:
        """Copy."""
        place.copy_(value)

    def fetch(self, place: Tensor) -> None:
        """Nothing to do."""

    def read(self, place: Tensor) -> Tensor:
        """The rows themselves."""
        return place

    def settle(self) -> None:
        """Nothing to do."""

    def free(self, key: Key) -> None:
        """Let go of it."""
        self._tensors.pop(key, None)

    def close(self) -> None:
        """Let go of everything."""
        self._tensors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store(
    tier: Tier,
    slabs: Mapping[str, Slab],
    *,
    device: torch.device | str = "cpu",
    directory: str | Path | None = None,
) -> DeviceStore | HostStore | DiskStore:
    """A store with all its slots; use it as a context manager, or `close` it.

    Args:
        tier: `none` keeps tensors on the device.
        slabs: Slots per kind of tensor; without meaning for `none`.
        device: Where tensors come from and go to.
        directory: For `disk`: an existing folder on a local disk; `~` is the user's.

    Raises:
        OffloadError: The directory cannot be written to or has too little space; names the bytes.
    """
    if tier == "none":
        return DeviceStore()
    if tier == "host":
        return HostStore(slabs, torch.device(device))
    if directory is None:
        raise ValueError("the disk tier needs a directory")
    return DiskStore(slabs, torch.device(device), Path(directory).expanduser())
