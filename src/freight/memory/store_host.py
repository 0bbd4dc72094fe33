"""Tensors in host memory: pinned and copied on streams of their own with CUDA, plainly copied without.

One allocation holds all slots, made once. It is registered with CUDA rather than allocated by it, because CUDA's host
allocator rounds sizes up to powers of two. Copies out run on one stream, copies in on another; events alone order them
with the computation, so no call waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from freight.errors import OffloadError
from freight.memory.slot_store import SlotStore
from freight.memory.slots import Slab, Slot, Slots


class HostStore(SlotStore[Any]):
    """A `TensorStore` in host memory.

    Args:
        slabs: Slots per kind of tensor.
        device: Where tensors come from and go to.

    Raises:
        OffloadError: There is not that much memory.
    """

    def __init__(self, slabs: Mapping[str, Slab], device: torch.device) -> None:
        slots = Slots(slabs)
        try:
            memory = torch.empty(slots.total_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise OffloadError(
                f"`offload` to host memory needs {slots.total_bytes} bytes, which cannot be allocated. "
                "Use `disk`, or a shorter row."
            ) from error
        super().__init__(slots, memory)
        self._copies: _CudaCopies | _PlainCopies = (
            _CudaCopies(device, memory) if device.type == "cuda" else _PlainCopies()
        )

    @property
    def wait_seconds(self) -> float:
        """Time that the computation waited for copies."""
        return self._copies.wait_seconds()

    def _send(self, slot: Slot, value: Tensor) -> None:
        self._copies.out(value, slot.view(self._memory))

    def _begin(self, slot: Slot) -> Any:
        return self._copies.begin(slot.view(self._memory))

    def _finish(self, slot: Slot, begun: Any) -> Tensor:
        return self._copies.finish(begun)

    def settle(self) -> None:
        """Nothing to do: on the CPU copies are done when they are asked for."""

    def close(self) -> None:
        """Unpin and free the memory."""
        self._copies.close()
        super().close()


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
