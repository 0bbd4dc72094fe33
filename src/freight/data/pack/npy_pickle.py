"""Reads the pickle inside an `.npy` file of objects by itself, so that no byte of the file can run code.

Python's unpickler builds whatever a file names; this reader knows plain values and NumPy's arrays, scalars and dtypes,
makes those with its own code, and refuses every other name. It also needs far less memory: rows are handed out while
the file is read, and a list of numbers is an array of 8 bytes each instead of Python objects of 36. Runs of integers,
nearly all of a file, are found by one regular expression and decoded in C.
"""

from __future__ import annotations

import mmap
import pickle
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from freight.errors import DataError

INTEGERS = re.compile(rb"(?:K[\s\S]|M[\s\S]{2}|J[\s\S]{4})++")
TRUTHS = re.compile(rb"[\x88\x89]++")
# Opcodes of the pickle format (Python's pickletools describes them): size of a plain argument, or of a length field.
PLAIN = {op: 0 for op in b"(.])}aesutN\x85\x86\x87Rb\x94\x93"} | {
    ord("\x80"): 1, ord("\x95"): 8, ord("q"): 1, ord("r"): 4, ord("h"): 1, ord("j"): 4, ord("G"): 8,
}  # fmt: skip
COUNTED = {ord("C"): 1, ord("B"): 4, 0x8E: 8, 0x8C: 1, ord("X"): 4, 0x8D: 8, 0x8A: 1}
TEXTS, BYTES, LONG = b"\x8cX\x8d", b"CB\x8e", 0x8A
GETS, PUTS, MEMOIZE, GLOBAL, FLOAT, FIRST_INTEGER, FIRST_TRUTH = b"hj", b"qr", 0x94, ord("c"), ord("G"), ord("K"), 0x88
SHORT = 16


class Numbers:
    """A list: its numbers as arrays, other items as they are."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def extend(self, items: list[Any]) -> None:
        """Put items at the end; an array stands for its numbers."""
        for is_number, group in groupby(items, lambda item: isinstance(item, (bool, int, float))):
            values = list(group)
            self.parts += [np.array(values)] if is_number else values

    def array(self) -> np.ndarray:
        """All items in one array.

        Raises:
            ValueError: Some items are no numbers.
        """
        if not all(isinstance(part, np.ndarray) and part.ndim == 1 for part in self.parts):
            raise ValueError("items that are no numbers")
        return np.concatenate(self.parts) if self.parts else np.empty(0, np.int64)


class Kind:
    """A NumPy dtype under construction."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[|<>=]?(?:O8?|[iufb]\d{0,2}|\?)", name):
            raise ValueError(f"dtype {name[:20]}")
        self.dtype = np.dtype(name)

    def build(self, state: Any) -> None:
        """Take over the byte order."""
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class Array:
    """A NumPy array under construction; one of objects keeps its items as a list."""

    def __init__(self) -> None:
        self.value: np.ndarray | Numbers = Numbers()

    def build(self, state: Any) -> None:
        """Take over the contents."""
        _, shape, kind, _, raw = state
        if kind.dtype.hasobject:
            self.value = raw
            return
        array = np.frombuffer(raw, kind.dtype)
        if shape != (len(array),):
            raise ValueError(f"an array of shape {shape}")
        self.value = array.astype(array.dtype.newbyteorder("="))


class Name(NamedTuple):
    """What a file names, and what is done instead of calling it."""

    text: str
    make: Callable[..., Any]


def _scalar(kind: Kind, raw: bytes) -> Any:
    return np.frombuffer(raw, kind.dtype)[0].item()


NAMES: Mapping[str, Callable[..., Any]] = {
    "numpy.ndarray": lambda *_: Array(),
    "numpy.dtype": lambda name, *_: Kind(name),
    **{
        f"numpy.{core}.multiarray.{name}": make
        for core in ("core", "_core")
        for name, make in (("_reconstruct", lambda *_: Array()), ("scalar", _scalar))
    },
}


def read_header(path: Path) -> tuple[int, int]:
    """Number of objects, and where their pickle begins.

    Raises:
        DataError: No `.npy` file, or not a list of objects.
    """
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            start = file.tell()
    except OSError:
        raise
    except Exception as error:  # whatever NumPy's parser of the header raises, the file is the user's to fix
        raise DataError(f"{path}: is no .npy file ({(str(error) or type(error).__name__).splitlines()[0]}).") from None
    if not dtype.hasobject or len(shape) != 1:
        raise DataError(f"{path}: holds an array of {dtype} with shape {shape}; expected a list of rows.")
    return shape[0], start


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The mappings of an object array, one at a time; lists in them are `Numbers`.

    Raises:
        DataError: A name that is not allowed, or a damaged file.
    """
    count, start = read_header(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            fetched = {argument for op, argument in _operations(data, start) if op in GETS}
            found = 0
            for item in _items(data, start, fetched):
                found += 1
                if not isinstance(item, dict):
                    raise DataError(f"row {found - 1} is no mapping of input_ids, loss_mask and seq_start_id.")
                yield item
        except DataError as error:
            raise DataError(f"{path}: {error}") from None
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
            raise DataError(f"{path}: is damaged, or no list of packed rows ({error}).") from None
    if found != count:
        raise DataError(f"{path}: holds {found:,} rows, its header says {count:,}.")


def _operations(data: mmap.mmap, place: int) -> Iterator[tuple[int, Any]]:
    """Opcodes with their arguments; a run of integers or truth values comes as one, with its bytes."""
    while True:
        op = data[place]
        if op in b"KMJ\x88\x89":
            kind, pattern = (FIRST_INTEGER, INTEGERS) if op in b"KMJ" else (FIRST_TRUTH, TRUTHS)
            run = pattern.match(data, place)
            if run is None:
                raise ValueError("it ends in the middle of a number")
            yield kind, run.group()
            place = run.end()
            continue
        place += 1
        if op in PLAIN:
            argument = data[place : place + PLAIN[op]]
            place += PLAIN[op]
            yield op, argument if op == FLOAT else int.from_bytes(argument, "little")
            if op == ord("."):
                return
        elif op in COUNTED:
            size = int.from_bytes(data[place : place + COUNTED[op]], "little")
            place += COUNTED[op]
            if place + size > len(data):
                raise ValueError("it ends in the middle of a value")
            yield op, data[place : place + size]
            place += size
        elif op == GLOBAL:
            middle = data.find(b"\n", place)
            end = -1 if middle < 0 else data.find(b"\n", middle + 1)
            if end < 0:
                raise ValueError("it ends in the middle of a name")
            yield op, data[place:end].replace(b"\n", b".")
            place = end + 1
        else:
            raise ValueError(f"opcode {op:#04x}")


def _items(data: mmap.mmap, start: int, fetched: set[int]) -> Iterator[Any]:
    """Items of the outermost array, as soon as they are complete; only what is `fetched` again is remembered."""
    stack: list[Any] = []
    outer: list[list[Any]] = []
    memo: dict[int, Any] = {}
    remembered = 0
    for op, argument in _operations(data, start):
        if op in (FIRST_INTEGER, FIRST_TRUTH):
            stack += _run(op, argument)
        elif op == ord("("):
            outer.append(stack)
            stack = []
        elif op in b"aesut":
            done, stack = _collected(op, stack, outer)
            if isinstance(done, list):
                yield from done
        elif op in GETS:
            stack.append(memo[argument])
        elif op in PUTS or op == MEMOIZE:
            place = remembered if op == MEMOIZE else argument
            remembered += 1
            if place in fetched:
                memo[place] = stack[-1]
        elif op == ord("R"):
            arguments, name = stack.pop(), stack.pop()
            if not isinstance(name, Name):
                raise ValueError("a call of something that has no name")
            stack.append(name.make(*arguments))
        elif op == ord("b"):
            state = stack.pop()
            if not isinstance(stack[-1], (Array, Kind)):
                raise ValueError("contents for something that is no array")
            stack[-1].build(state)
        elif op != ord(".") and op not in b"\x80\x95":
            stack.append(_value(op, argument, stack))
    if not isinstance(stack[-1], Array):
        raise ValueError("it holds no array")


def _run(op: int, run: bytes) -> Sequence[Any]:
    """Values of a run; those of a long one, which only a list can hold, as one array."""
    if op == FIRST_TRUTH:
        array = np.frombuffer(run, np.uint8) == 0x88
        return array.tolist() if len(array) < SHORT else [array]
    values = pickle.loads(b"(" + run + b"t.")  # integer opcodes alone, as matched
    return values if len(values) < SHORT else [np.array(values)]


def _collected(op: int, stack: list[Any], outer: list[list[Any]]) -> tuple[list[Any] | None, list[Any]]:
    """Put collected values where they belong; rows, which are mappings in a list, are handed back instead."""
    if op in b"as":
        values, below = [stack.pop()], stack
        if op == ord("s"):
            values.insert(0, stack.pop())
    else:
        values, below = stack, outer.pop()
    if op == ord("t"):
        below.append(tuple(values))
    elif op in b"su":
        if not isinstance(below[-1], dict):
            raise ValueError("entries of something that is no mapping")
        below[-1].update(zip(values[::2], values[1::2], strict=True))
    elif not isinstance(below[-1], Numbers):
        raise ValueError("items of something that is no list")
    elif any(isinstance(value, dict) for value in values):
        return values, below
    else:
        below[-1].extend(values)
    return None, below


def _value(op: int, argument: Any, stack: list[Any]) -> Any:
    """A value that one opcode makes."""
    if op in TEXTS:
        return argument.decode()
    if op in BYTES:
        return argument
    if op == LONG:
        return int.from_bytes(argument, "little", signed=True)
    if op == FLOAT:
        return struct.unpack(">d", argument)[0]
    if op in b"\x85\x86\x87":
        count = op - 0x84
        taken = tuple(stack[-count:])
        del stack[-count:]
        return taken
    if op in (GLOBAL, 0x93):
        if op == 0x93:
            name, module = stack.pop(), stack.pop()
            return _named(f"{module}.{name}")
        return _named(argument.decode())
    return {ord("]"): Numbers, ord("}"): dict, ord(")"): tuple, ord("N"): lambda: None}[op]()


def _named(text: str) -> Name:
    if text not in NAMES:
        raise DataError(f"names `{text}`; only NumPy arrays and plain values are read, so the file is refused.")
    return Name(text, NAMES[text])
