"""NeMo's packed rows: an `.npy` file of `{input_ids, loss_mask, seq_start_id}`, read and written.

There a sequence is stored whole and consumed as inputs `ids[:-1]` beside labels `ids[1:]`, so its length is counted
without the last token. Freight keeps that token as the `tail_label` of the span, which puts rows back to their pack
size. What `loss_mask` means has changed between NeMo's releases, and a file does not say which it follows:

- `token` (2.0.0): entry i says that token i is a target;
- `label` (later): entry i says that the token after i is one.

Both are read and written row by row: memory does not grow with the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from freight.data.documents import NO_TAIL
from freight.data.pack.npy_pickle import Array, Numbers, read_header, read_objects
from freight.data.pack.rows import Row
from freight.errors import ConfigError, DataError

NpyMask = Literal["label", "token"]
SUFFIX = ".npy"
KEYS = ("input_ids", "loss_mask", "seq_start_id")
LARGEST_ID = 2**31 - 1


class NpyFile:
    """Rows of an `.npy` file, in order; each pass reads the file anew.

    Args:
        path: The file.
        mask: What its `loss_mask` means.
        pad_id: For `padded_rows`; None = not known.

    Raises:
        DataError: No list of objects.
    """

    def __init__(self, path: Path, mask: NpyMask, pad_id: int | None = None) -> None:
        self.path = path
        self.padded_rows = 0
        self.unread_keys: set[str] = set()
        self._mask = mask
        self._pad_id = pad_id
        self._count, _ = read_header(path)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Row]:
        """Rows; documents are numbered as they come. `padded_rows` and `unread_keys` are known after a whole pass.

        Raises:
            DataError: Names the row, from 0, and what is wrong with it.
        """
        documents = 0
        self.padded_rows = 0
        for number, fields in enumerate(read_objects(self.path)):
            try:
                row = self._row(fields, documents)
            except ValueError as error:
                raise DataError(f"{self.path}: row {number}: {error}") from None
            documents += len(row.lengths)
            yield row

    def _row(self, fields: dict[str, Any], first_document: int) -> Row:
        missing = [key for key in KEYS if key not in fields]
        if missing:
            there = ", ".join(sorted(map(str, fields))) or "nothing"
            raise ValueError(f"`{missing[0]}` is missing; it has {there}.")
        self.unread_keys |= set(map(str, fields)) - set(KEYS)
        ids, mask, starts = (_integers(fields[key], key) for key in KEYS)
        _check(ids, mask, starts)
        ends = np.append(starts[1:], len(ids))
        targets = mask.astype(np.bool_)
        if self._mask == "label":
            targets = np.roll(targets, 1)
        targets[starts] = False
        last = ends - 1
        self.padded_rows += self._is_padded(ids, targets, starts, last)
        inputs = np.ones(len(ids), np.bool_)
        inputs[last] = False
        return Row(
            ids=ids[inputs].astype(np.int32),
            loss_mask=targets[inputs],
            lengths=last - starts,
            tail_labels=np.where(targets[last], ids[last], NO_TAIL),
            documents=first_document + np.arange(len(starts)),
        )

    def _is_padded(self, ids: np.ndarray, targets: np.ndarray, starts: np.ndarray, last: np.ndarray) -> bool:
        """Whether a sequence ends in two or more targets that are the pad id: padding, or end-of-text, who knows."""
        if self._pad_id is None:
            return False
        padding = targets & (ids == self._pad_id)
        return bool(np.any(padding[last] & padding[last - 1] & (last - starts >= 2)))


def _integers(value: Any, key: str) -> np.ndarray:
    """int64 array of a row's field."""
    if isinstance(value, Array):
        value = value.value
    if isinstance(value, Numbers):
        try:
            value = value.array()
        except ValueError as error:
            raise ValueError(f"`{key}` holds {error}.") from None
    if not isinstance(value, np.ndarray):
        raise ValueError(f"`{key}` must be a list of integers; got {type(value).__name__}.")
    with np.errstate(invalid="ignore"):  # nan and inf become some integer, which differs from them
        whole = value.astype(np.int64) if value.dtype.kind in "biuf" else value
    odd = np.flatnonzero(whole != value) if whole is not value else np.arange(min(1, len(value)))
    if len(odd):
        raise ValueError(f"`{key}` must be a list of integers; got {value[odd[0]]} at place {odd[0]}.")
    return whole


def _check(ids: np.ndarray, mask: np.ndarray, starts: np.ndarray) -> None:
    if len(mask) != len(ids):
        raise ValueError(f"`loss_mask` has {len(mask):,} entries for {len(ids):,} `input_ids`.")
    wrong = np.flatnonzero((mask != 0) & (mask != 1))
    if len(wrong):
        raise ValueError(f"`loss_mask` holds {mask[wrong[0]]} at place {wrong[0]}; only 0 and 1 have a meaning.")
    wrong = np.flatnonzero((ids < 0) | (ids > LARGEST_ID))
    if len(wrong):
        raise ValueError(f"`input_ids` holds {ids[wrong[0]]} at place {wrong[0]}, which is no token id.")
    if not len(starts) or starts[0] != 0:
        raise ValueError(f"`seq_start_id` must begin with 0; got {starts[:1].tolist()}.")
    sizes = np.diff(np.append(starts, len(ids)))
    wrong = np.flatnonzero(sizes < 1)
    if len(wrong):
        raise ValueError(
            f"`seq_start_id` must increase and stay below the {len(ids):,} `input_ids`; sequence {wrong[0]} starts at "
            f"{starts[wrong[0]]} and has {sizes[wrong[0]]} tokens."
        )
    wrong = np.flatnonzero(sizes < 2)
    if len(wrong):
        raise ValueError(f"sequence {wrong[0]} is one token, which leaves no input once its last is the label.")


def write_npy(
    path: Path,
    rows: Iterable[Row],
    num_rows: int,
    mask: NpyMask,
    pad_id: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Write rows so that NeMo computes the same inputs and targets.

    A span whose last input predicts nothing gets one more token, the pad id, never a target: NeMo takes the last token
    of a sequence for a label, and would leave out the input otherwise.

    Args:
        path: Written as it is; the caller renames.
        rows: The rows.
        num_rows: How many.
        mask: What `loss_mask` shall mean.
        pad_id: See above.
        progress: Called with rows written, rows in all, and a word.
    """
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (num_rows,)})
        file.write(_BEGIN + _ROWS % struct.pack("<i", num_rows))
        for number, row in enumerate(rows, 1):
            file.write(b"(" + _pickled(row, mask, pad_id) + b"e")
            if progress:
                progress(number, num_rows, f"write {path.name}")
        file.write(b"tb.")


# The pickle of an array of objects as NumPy 1 writes it, which NumPy 2 reads too, up to the list of its items.
_BEGIN = b"\x80\x03cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
_KIND = b"cnumpy\ndtype\nX\x02\0\0\0O8\x89\x88\x87R(K\x03X\x01\0\0\0|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3ftb"
_ROWS = b"(K\x01J%s\x85" + _KIND + b"\x89]"


def _pickled(row: Row, mask: NpyMask, pad_id: int) -> bytes:
    """A row as a mapping, in pickle's opcodes."""
    ends = np.cumsum(row.lengths)
    has_tail = row.tail_labels != NO_TAIL
    ids = np.insert(row.ids, ends, np.where(has_tail, row.tail_labels, pad_id))
    targets = np.insert(row.loss_mask, ends, has_tail)
    starts = (ends - row.lengths) + np.arange(len(ends))
    if mask == "label":
        targets = np.append(targets[1:], False)
    fields = (_integer_opcodes(ids), np.where(targets, b"\x88", b"\x89").tobytes(), _integer_opcodes(starts))
    pairs = (
        b"X" + struct.pack("<I", len(key)) + key.encode() + b"](" + items + b"e"
        for key, items in zip(KEYS, fields, strict=True)
    )
    return b"}(" + b"".join(pairs) + b"u"


def _integer_opcodes(values: np.ndarray) -> bytes:
    """`M` and two bytes each, or `J` and four where a value needs them."""
    opcode, kind = ("M", "<u2") if values.max() < 1 << 16 else ("J", "<i4")
    codes = np.empty(len(values), dtype=[("opcode", "S1"), ("value", kind)])
    codes["opcode"], codes["value"] = opcode, values
    return codes.tobytes()


def check_npy_mask(mask: str | None, key: str) -> NpyMask:
    """The mask's meaning, which must be stated.

    Args:
        mask: As given.
        key: What the user sets.

    Raises:
        ConfigError: Missing, or unknown.
    """
    if mask == "token" or mask == "label":
        return mask
    got = "it is missing" if mask is None else f"got {mask!r}"
    raise ConfigError(
        f"`{key}` must be token or label; {got}. An .npy file does not say what its loss_mask means: token = entry i "
        "is about token i (NeMo 2.0.0), label = about the token after it (later releases)."
    )
