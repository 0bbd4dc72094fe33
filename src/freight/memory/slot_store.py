"""What stores off the device have in common: slots for keys and for lent tensors, in one piece of memory.

A key's tensor lies in a slot like the rows of a lent one, so putting is writing, and getting is reading, at its place.
Which copies are under way is known here; how bytes get there and back is left to each tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from freight.memory.slots import Slot, Slots
from freight.ops.attention_math import working_dtype
from freight.ops.protocols import Key

Begun = TypeVar("Begun")


class SlotStore(ABC, Generic[Begun]):
    """A `TensorStore` in memory off the device.

    Args:
        slots: Of the memory.
        memory: uint8 `[slots.total_bytes]`, or more.
    """

    on_device = False

    def __init__(self, slots: Slots, memory: Tensor) -> None:
        self.bytes_in = self.bytes_out = 0
        self._slots, self._memory = slots, memory
        self._fetched: dict[int, tuple[Slot, Begun]] = {}  # under way or here, by first byte

    def put(self, key: Key, tensor: Tensor) -> None:
        """Begin to write it to its slot."""
        self.write(self._slots.take(key, tensor.shape, tensor.dtype).view(self._memory), tensor)

    def prefetch(self, key: Key) -> None:
        """Begin to bring it to the device."""
        self.fetch(self._slots[key].view(self._memory))

    def get(self, key: Key) -> Tensor:
        """A copy on the device, or the tensor itself while it has not left yet."""
        return self.read(self._slots[key].view(self._memory))

    def accumulate(self, key: Key, tensor: Tensor) -> None:
        """Add on the device, and put the sum."""
        if key in self._slots:
            self.put(key, self.get(key) + tensor)
        else:
            self.put(key, tensor.to(working_dtype(tensor.dtype), copy=True))

    def free(self, key: Key) -> None:
        """Give its slot to others; each tier keeps the order of what was asked of it."""
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
        """Begin to write values; what was fetched of the place is out of date."""
        if not self.holds(place):
            place.copy_(value)
            return
        slot = Slot.of(place, self._memory)
        for start in [start for start, (other, _) in self._fetched.items() if other.overlaps(slot)]:
            del self._fetched[start]
        self._send(slot, value.detach())
        self.bytes_out += slot.nbytes

    def fetch(self, place: Tensor) -> None:
        """Begin to bring values to the device, unless they are under way or have not left yet."""
        slot = Slot.of(place, self._memory)
        if slot.start not in self._fetched and (begun := self._begin(slot)) is not None:
            self._fetched[slot.start] = slot, begun
            self.bytes_in += slot.nbytes

    def read(self, place: Tensor) -> Tensor:
        """A copy on the device, or the values while they have not left; what the store does not hold, itself."""
        if not self.holds(place):
            return place
        slot = Slot.of(place, self._memory)
        if slot.start in self._fetched and self._fetched[slot.start][0] != slot:
            del self._fetched[slot.start]  # it was fetched in another form
        self.fetch(place)
        return self._finish(slot, self._fetched.pop(slot.start, (slot, None))[1])

    @abstractmethod
    def _send(self, slot: Slot, value: Tensor) -> None:
        """Begin to write values to a slot."""

    @abstractmethod
    def _begin(self, slot: Slot) -> Begun | None:
        """Begin to copy a slot to the device; None if its values have not left the device yet."""

    @abstractmethod
    def _finish(self, slot: Slot, begun: Begun | None) -> Tensor:
        """The values of a slot on the device, from what `_begin` gave."""

    def close(self) -> None:
        """Let go of the memory."""
        self._fetched.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
