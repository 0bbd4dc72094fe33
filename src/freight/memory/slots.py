"""Fixed slots in one piece of memory: which one holds which tensor.

A slab is a number of equal slots for one kind of tensor. Tensors of any shape and dtype up to the slot's size go in;
their last, shorter chunk just leaves the end of its slot unused.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from freight.errors import OffloadError
from freight.ops.protocols import Key

ALIGNMENT = 64  # bytes; any dtype, and whole cache lines


class Slab(NamedTuple):
    """Slots for one kind of tensor.

    Args:
        slots: Tensors that are kept at one time, at most.
        slot_bytes: Bytes of the largest.
    """

    slots: int
    slot_bytes: int


@dataclass(frozen=True)
class Slot:
    """A tensor's place.

    Args:
        start: First byte in the memory of all slabs.
        shape: Of the tensor.
        dtype: Of the tensor.
    """

    start: int
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, place: Tensor, memory: Tensor) -> Slot:
        """Where a contiguous view of the memory of all slabs lies."""
        return cls(place.data_ptr() - memory.data_ptr(), place.shape, place.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def overlaps(self, other: Slot) -> bool:
        """Whether two tensors share a byte."""
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes

    def view(self, memory: Tensor) -> Tensor:
        """The tensor as a view of the memory of all slabs, uint8 `[bytes]`."""
        return memory[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


class Slots:
    """Gives slots to keys and takes them back.

    Args:
        slabs: By name of the kind.
    """

    def __init__(self, slabs: Mapping[str, Slab]) -> None:
        self._slabs = dict(slabs)
        self._taken: dict[Key, Slot] = {}
        self._free: dict[str, list[int]] = {}
        self._lent = count(-1, -1)  # owners of lent slots, unlike those of keys
        self.total_bytes = 0
        for name, slab in self._slabs.items():
            stride = -(-slab.slot_bytes // ALIGNMENT) * ALIGNMENT
            starts = [self.total_bytes + stride * i for i in range(slab.slots)]
            self._free[name] = starts[::-1]  # the first slot is taken first
            self.total_bytes += stride * slab.slots

    def __contains__(self, key: Key) -> bool:
        return key in self._taken

    def __getitem__(self, key: Key) -> Slot:
        return self._taken[key]

    def take(self, key: Key, shape: torch.Size, dtype: torch.dtype) -> Slot:
        """A slot for a tensor; the one its key has already, if any.

        Raises:
            OffloadError: All slots of its kind are taken, or it is larger than they are.
        """
        slab, size = self._slabs[key.name], shape.numel() * dtype.itemsize
        if size > slab.slot_bytes:
            raise OffloadError(
                f"a tensor for `{key.name}` has {size} bytes, its slot {slab.slot_bytes}: the row is longer "
                "than the stores were sized for. Raise `train.micro_batch_tokens`, or shorten the row."
            )
        if key in self._taken:
            start = self._taken[key].start
        elif self._free[key.name]:
            start = self._free[key.name].pop()
        else:
            raise OffloadError(
                f"all {slab.slots} slots for `{key.name}` are taken: more is in flight than the stores were sized for."
            )
        self._taken[key] = slot = Slot(start, shape, dtype)
        return slot

    def lend(self, name: str, shape: torch.Size, dtype: torch.dtype, memory: Tensor) -> Tensor:
        """A tensor in a slot, which is taken back when nothing holds the tensor or a view of it any more.

        Args:
            name: Of the kind.
            shape: Of the tensor.
            dtype: Of the tensor.
            memory: Of all slabs, uint8 `[bytes]`.
        """
        key = Key(name, next(self._lent))
        slot = self.take(key, shape, dtype)
        # A tensor made of an array keeps the array as long as its storage lives, whoever holds that.
        array = memory[slot.start : slot.start + slot.nbytes].numpy()
        weakref.finalize(array, self.release, key).atexit = False
        # Detached, it is no view to autograd, which would have FSDP warn of writes that could reach it.
        return torch.from_numpy(array).view(dtype).view(shape).detach()

    @staticmethod
    def within(tensor: Tensor, memory: Tensor) -> bool:
        """Whether a tensor lies in the memory of all slabs."""
        first = memory.data_ptr()
        return tensor.device.type == "cpu" and first <= tensor.data_ptr() < first + memory.numel()

    def release(self, key: Key) -> None:
        """Take a key's slot back; nothing if it has none."""
        if slot := self._taken.pop(key, None):
            self._free[key.name].append(slot.start)
