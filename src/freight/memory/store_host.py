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
from freight.memory.slots import Slab, Slot, Slots
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
        self._fetched: dict[int, tuple[Slot, Any]] = {}

    @property
    def wait_seconds(self) -> float:
        """Time that the computation waited for copies."""
        return self._copies.wait_seconds()

    def put(self, key: Key, tensor: Tensor) -> None:
        """Copy it to its slot."""
        self.write(self._slots.take(key, tensor.shape, tensor.dtype).view(self._memory), tensor)

    def prefetch(self, key: Key) -> None:
        """Begin to copy it to the device."""
        self.fetch(self._slots[key].view(self._memory))

    def get(self, key: Key) -> Tensor:
        """A copy on the device."""
        return self.read(self._slots[key].view(self._memory))

    def accumulate(self, key: Key, tensor: Tensor) -> None:
        """Add on the device, and put the sum."""
        if key in self._slots:
            self.put(key, self.get(key) + tensor)
        else:
            self.put(key, tensor.to(working_dtype(tensor.dtype), copy=True))

    def free(self, key: Key) -> None:
        """Give its slot to others."""
        if key in self._slots:
            self._fetched.pop(self._slots[key].start, None)
        self._slots.release(key)

    def lend(self, name: str, like: Tensor, rows: int) -> Tensor:
        """A tensor in a slot."""
        return self._slots.lend(name, torch.Size((rows, *like.shape[1:])), like.dtype, self._memory)

    def holds(self, tensor: Tensor) -> bool:
        """Whether its memory is the store's."""
        return Slots.within(tensor, self._memory)

    def write(self, place: Tensor, value: Tensor) -> None:
        """Copy values to a place."""
        if not self.holds(place):
            place.copy_(value)
            return
        slot = Slot.of(place, self._memory)
        for start in [start for start, (other, _) in self._fetched.items() if other.overlaps(slot)]:
            del self._fetched[start]
        self._copies.out(value.detach(), place)
        self.bytes_out += slot.nbytes

    def fetch(self, place: Tensor) -> None:
        """Begin to copy a place to the device."""
        slot = Slot.of(place, self._memory)
        if slot.start not in self._fetched:
            self._fetched[slot.start] = slot, self._copies.begin(place)
            self.bytes_in += slot.nbytes

    def read(self, place: Tensor) -> Tensor:
        """A copy on the device; what the store does not hold, itself."""
        if not self.holds(place):
            return place
        self.fetch(place)
        slot, begun = self._fetched.pop(Slot.of(place, self._memory).start)
        if slot != Slot.of(place, self._memory):
            begun = self._copies.begin(place)  # it was fetched in another form
        return self._copies.finish(begun)

    def settle(self) -> None:
        """Nothing to do: on the CPU copies are done when they are asked for."""

    def close(self) -> None:
        """Unpin and free the memory."""
        self._fetched.clear()
        self._copies.close()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _PlainCopies:
    """Copies between host memory and host memory: done when the call returns, nothing to fetch ahead."""

    def wait_seconds(self) -> float:
        return 0.0

    def out(self, value: Tensor, place: Tensor) -> None:
        place.copy_(value)

    def begin(self, place: Tensor) -> Tensor:
        return place.clone()

    def finish(self, begun: Any) -> Tensor:
        return begun

    def close(self) -> None:
        pass


class _CudaCopies:
    """Copies over two streams. Each begins after the copies of the other that were asked for before it."""

    def __init__(self, device: torch.device, memory: Tensor) -> None:
        self._device, self._memory = device, memory
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waited = 0.0
        # Without room to pin, copies still are right, only not hidden.
        self.pinned = memory.numel() == 0 or _register(memory)

    def wait_seconds(self) -> float:
        done = [(before, after) for before, after in self._waits if after.query()]
        self._waits = self._waits[len(done) :]
        self._waited += sum(before.elapsed_time(after) for before, after in done) / 1000
        return self._waited

    def out(self, value: Tensor, place: Tensor) -> None:
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        self._outward.wait_stream(self._inward)
        with torch.cuda.stream(self._outward):
            place.copy_(value, non_blocking=True)
        value.record_stream(self._outward)

    def begin(self, place: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        self._inward.wait_stream(self._outward)
        with torch.cuda.stream(self._inward):
            tensor = place.to(self._device, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(self._inward)
        return tensor, arrived

    def finish(self, begun: Any) -> Tensor:
        tensor, arrived = begun
        stream = torch.cuda.current_stream(self._device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(arrived)
        after.record(stream)
        self._waits.append((before, after))
        tensor.record_stream(stream)
        return tensor

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        if self.pinned and self._memory.numel():
            cast(Any, torch.cuda.cudart()).cudaHostUnregister(self._memory.data_ptr())


def _register(memory: Tensor) -> bool:
    """Pin memory in place; whether that worked."""
    return int(cast(Any, torch.cuda.cudart()).cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0
