"""Tensors in one file on a local disk, mapped into memory and moved by threads.

The file is allocated whole, so that a full disk shows at the start and not in the middle of a step, and has no name
once it is open, so that it vanishes with the process however that ends. After each copy the pages are dropped from the
process: its resident memory stays what the computation needs, and the kernel decides how much of the file it caches.
At most two tensors wait to be written; the computation waits for the disk rather than filling memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from freight.errors import OffloadError
from freight.memory.slot_store import SlotStore
from freight.memory.slots import Slab, Slot, Slots

FILE_PREFIX = "freight-offload-"
READERS = 2
WAITING_WRITES = 2
MS_ASYNC = 1  # of msync(2); Python's mmap only has the waiting form

T = TypeVar("T")


class DiskStore(SlotStore[Future[Tensor]]):
    """A `TensorStore` on disk.

    Args:
        slabs: Slots per kind of tensor.
        device: Where tensors come from and go to.
        directory: An existing folder; local NVMe, if the transfers are to hide behind the computation.

    Raises:
        OffloadError: The directory cannot be written to, or has too little space.
    """

    def __init__(self, slabs: Mapping[str, Slab], device: torch.device, directory: Path) -> None:
        slots = Slots(slabs)
        self._file = _MappedFile(directory, max(slots.total_bytes, 1))
        super().__init__(slots, self._file.memory)
        self.wait_seconds = 0.0
        self._device = device
        self._writer = ThreadPoolExecutor(1, "freight-write")
        self._readers = ThreadPoolExecutor(READERS, "freight-read")
        self._writing: deque[tuple[Slot, Tensor, Future[None]]] = deque()  # in order; one thread writes them

    def _send(self, slot: Slot, value: Tensor) -> None:
        """Hand values to the writer."""
        self._settle(WAITING_WRITES - 1)
        self._writing.append((slot, value, self._writer.submit(self._write, slot, value, _event(value))))

    def _begin(self, slot: Slot) -> Future[Tensor] | None:
        """Have a reader begin, unless the values have not left yet."""
        self._settle(WAITING_WRITES)
        latest = self._latest_write(slot)
        if latest is not None and latest[0] == slot:
            return None
        if latest is not None:
            self._wait(latest[2])  # written in another form than it is read
        return self._readers.submit(self._file.read, slot, self._device.type == "cuda")

    def _finish(self, slot: Slot, begun: Future[Tensor] | None) -> Tensor:
        if begun is not None:
            return self._wait(begun).to(self._device, non_blocking=True)
        latest = self._latest_write(slot)
        assert latest is not None
        return latest[1]

    def settle(self) -> None:
        """Wait for all writes, if the computation is on the CPU and could read what they write."""
        self._settle(0 if self._device.type == "cpu" else WAITING_WRITES)

    def _latest_write(self, slot: Slot) -> tuple[Slot, Tensor, Future[None]] | None:
        """The last write under way that touches a place."""
        return next((write for write in reversed(self._writing) if write[0].overlaps(slot)), None)

    def close(self) -> None:
        """End the threads and give the space back."""
        self._writer.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        self._writing.clear()
        super().close()
        self._file.close()

    def _write(self, slot: Slot, tensor: Tensor, ready: torch.cuda.Event | None) -> None:
        if ready is not None:
            ready.synchronize()
        self._file.write(slot, tensor)

    def _settle(self, waiting: int) -> None:
        """Wait until at most so many writes are under way; raise what a finished one has raised."""
        while self._writing and (len(self._writing) > waiting or self._writing[0][2].done()):
            self._wait(self._writing.popleft()[2])

    def _wait(self, future: Future[T]) -> T:
        start = time.perf_counter()
        try:
            return future.result()
        except OSError as error:
            raise OffloadError(f"`offload.directory` {self._file.directory}: {error}.") from error
        finally:
            self.wait_seconds += time.perf_counter() - start


def _event(tensor: Tensor) -> torch.cuda.Event | None:
    """When a tensor's values will be there; None for host memory, where they are."""
    if tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


class _MappedFile:
    """A nameless file of a fixed size, as memory."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        descriptor = _allocate(directory, size)
        try:
            self._map = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
        finally:
            os.close(descriptor)  # the mapping keeps the file
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._libc = ctypes.CDLL(None, use_errno=True)

    def write(self, slot: Slot, tensor: Tensor) -> None:
        """Copy a tensor to its slot and let the kernel write it."""
        slot.view(self.memory).copy_(tensor)
        start, length = _pages(slot)
        if self._libc.msync(ctypes.c_void_p(self.memory.data_ptr() + start), ctypes.c_size_t(length), MS_ASYNC):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def read(self, slot: Slot, pinned: bool) -> Tensor:
        """A copy of a slot in (pinned) host memory."""
        tensor = torch.empty(slot.shape, dtype=slot.dtype, pin_memory=pinned)
        tensor.copy_(slot.view(self.memory))
        self._map.madvise(mmap.MADV_DONTNEED, *_pages(slot))
        return tensor

    def close(self) -> None:
        """Unmap it, which frees its space."""
        del self.memory
        with suppress(BufferError):  # a tensor that was lent still lives: then it goes with that
            self._map.close()


def _pages(slot: Slot) -> tuple[int, int]:
    """First byte and length of the pages that a slot touches."""
    start = slot.start // mmap.PAGESIZE * mmap.PAGESIZE
    return start, slot.start + max(slot.nbytes, 1) - start


def _allocate(directory: Path, size: int) -> int:
    """Descriptor of a new nameless file with all its space."""
    free = None
    path = directory / f"{FILE_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    try:
        for leftover in directory.glob(f"{FILE_PREFIX}*"):
            leftover.unlink(missing_ok=True)  # of a run that was killed; a living one has no name here
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize
        if free >= size:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            path.unlink(missing_ok=True)
            os.posix_fallocate(descriptor, 0, size)
            return descriptor
        reason = "it has too little space"
    except OSError as error:
        reason = error.strerror or str(error)
    known = "" if free is None else f", {free} are free"
    raise OffloadError(
        f"`offload.directory` {directory} cannot be used: {reason}; {size} bytes are needed{known}. "
        "Name a folder on a disk with that much space."
    )
