"""Tensors in host memory: pinned and copied on streams of their own with CUDA, plainly copied without.

One allocation holds all slots, made once. It is registered with CUDA rather than allocated by it, because CUDA's host
allocator rounds sizes up to powers of two. Copies out run on one stream, copies in on another; events alone order them
with the computation, so no call waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor

from freight.errors import OffloadError
from freight.memory.slots import Slab, Slots
from freight.ops.attention_math import working_dtype
from freight.ops.protocols import Key


class HostStore:
    """A `TensorStore` in host memory.

    Args:
        slabs: Slots per kind of tensor.
        device: Where tensors come from and go to.

    Raises:
        OffloadError: There is not that much memory.
    """

    on_device = False

    def __init__(self, slabs: Mapping[str, Slab], device: torch.device) -> None:
        self.bytes_in = self.bytes_out = 0
        self._slots = Slots(slabs)
        try:
            self._memory = torch.empty(self._slots.total_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise OffloadError(
                f"`offload` to host memory needs {self._slots.total_bytes} bytes, which cannot be allocated. "
                "Use `disk`, or a shorter row."
            ) from error
        self._copies: _CudaCopies | _PlainCopies = (
            _CudaCopies(device, self._memory) if device.type == "cuda" else _PlainCopies()
        )

    @property
    def wait_seconds(self) -> float:
        """Time that the computation waited for copies."""
        return self._copies.wait_seconds()

    def put(self, key: Key, tensor: Tensor) -> None:
        """Copy it to its slot."""
        slot = self._slots.take(key, tensor)
        self._copies.out(slot.start, tensor.detach(), slot.view(self._memory))
        self._copies.forget(key)
        self.bytes_out += slot.nbytes

    def prefetch(self, key: Key) -> None:
        """Begin to copy it to the device."""
        slot = self._slots[key]
        if self._copies.begin(key, slot.start, slot.view(self._memory)):
            self.bytes_in += slot.nbytes

    def get(self, key: Key) -> Tensor:
        """A copy on the device."""
        self.prefetch(key)
        return self._copies.finish(key)

    def accumulate(self, key: Key, tensor: Tensor) -> None:
        """Add on the device, and put the sum."""
        if key in self._slots:
            self.put(key, self.get(key) + tensor)
        else:
            self.put(key, tensor.to(working_dtype(tensor.dtype), copy=True))

    def free(self, key: Key) -> None:
        """Give its slot to others."""
        self._slots.release(key)
        self._copies.forget(key)

    def close(self) -> None:
        """Unpin and free the memory."""
        self._copies.close()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _PlainCopies:
    """Copies between host memory and host memory: done when the call returns, nothing to fetch ahead."""

    def __init__(self) -> None:
        self._begun: dict[Key, Tensor] = {}

    def wait_seconds(self) -> float:
        return 0.0

    def out(self, slot: int, tensor: Tensor, place: Tensor) -> None:
        place.copy_(tensor)

    def begin(self, key: Key, slot: int, place: Tensor) -> bool:
        if key in self._begun:
            return False
        self._begun[key] = place.clone()
        return True

    def finish(self, key: Key) -> Tensor:
        return self._begun.pop(key)

    def forget(self, key: Key) -> None:
        self._begun.pop(key, None)

    def close(self) -> None:
        self._begun.clear()


class _CudaCopies:
    """Copies over two streams. A slot is read after it was written and written after it was read, by events."""

    def __init__(self, device: torch.device, memory: Tensor) -> None:
        self._device = device
        self._memory = memory
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._written: dict[int, torch.cuda.Event] = {}
        self._read: dict[int, torch.cuda.Event] = {}
        self._begun: dict[Key, tuple[Tensor, torch.cuda.Event]] = {}
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waited = 0.0
        # Without room to pin, copies still are right, only not hidden.
        self.pinned = memory.numel() == 0 or _register(memory)

    def wait_seconds(self) -> float:
        done = [(before, after) for before, after in self._waits if after.query()]
        self._waits = self._waits[len(done) :]
        self._waited += sum(before.elapsed_time(after) for before, after in done) / 1000
        return self._waited

    def out(self, slot: int, tensor: Tensor, place: Tensor) -> None:
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        if slot in self._read:
            self._outward.wait_event(self._read[slot])
        with torch.cuda.stream(self._outward):
            place.copy_(tensor, non_blocking=True)
        self._written[slot] = _mark(self._outward)
        tensor.record_stream(self._outward)

    def begin(self, key: Key, slot: int, place: Tensor) -> bool:
        if key in self._begun:
            return False
        self._inward.wait_event(self._written[slot])
        with torch.cuda.stream(self._inward):
            tensor = place.to(self._device, non_blocking=True)
        self._read[slot] = _mark(self._inward)
        self._begun[key] = tensor, self._read[slot]
        return True

    def finish(self, key: Key) -> Tensor:
        tensor, arrived = self._begun.pop(key)
        stream = torch.cuda.current_stream(self._device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(arrived)
        after.record(stream)
        self._waits.append((before, after))
        tensor.record_stream(stream)
        return tensor

    def forget(self, key: Key) -> None:
        self._begun.pop(key, None)

    def close(self) -> None:
        self._begun.clear()
        torch.cuda.synchronize(self._device)
        if self.pinned and self._memory.numel():
            cast(Any, torch.cuda.cudart()).cudaHostUnregister(self._memory.data_ptr())


def _register(memory: Tensor) -> bool:
    """Pin memory in place; whether that worked."""
    return int(cast(Any, torch.cuda.cudart()).cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind everything that the stream has been given so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event
