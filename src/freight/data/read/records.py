"""A record on its way from a file: where it stands, what it says, and why it may be refused.

Every reason a record can be refused for is in one closed list, so that counts by reason always add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

RAW_LIMIT = 4096


class Reason(StrEnum):
    """Why a record is not used."""

    INVALID_JSON = "invalid_json"
    INVALID_UTF8 = "invalid_utf8"
    NOT_AN_OBJECT = "not_an_object"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    UNKNOWN_ROLE = "unknown_role"
    BAD_TOOL_CALL = "bad_tool_call"
    UNSUPPORTED_PART = "unsupported_part"
    EMPTY = "empty"
    TEMPLATE_ERROR = "template_error"
    UNSTABLE_TEMPLATE = "unstable_template"
    NO_TARGET = "no_target"
    TOO_LONG = "too_long"
    ID_OUT_OF_RANGE = "id_out_of_range"
    DUPLICATE_KEY = "duplicate_key"


class RecordFault(Exception):
    """One record cannot be used; caught in this room, and turned into a reject or a `DataError`.

    Args:
        reason: Which kind of fault.
        field: Path of the field, `messages[2].content`, or "" for the whole record.
        message: What was expected and found.
    """

    def __init__(self, reason: Reason, field: str, message: str) -> None:
        self.reason = reason
        self.field = field
        self.message = message
        super().__init__(f"{field}: {message}" if field else message)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_fault, (type(self), self.args, self.__dict__)


def _restore_fault(kind: type[RecordFault], args: tuple[Any, ...], state: dict[str, Any]) -> RecordFault:
    """The fault as another process raised it."""
    fault = kind.__new__(kind, *args)
    fault.__dict__.update(state)
    return fault


@dataclass(frozen=True)
class Place:
    """Where a record stands.

    Args:
        path: The file.
        kind: Kind of reader, which decides what the number counts.
        number: Line, element or row, from 1; for a part of a text its first byte, from 0.
        stop: The byte after a part of a text.
    """

    path: Path
    kind: str
    number: int
    stop: int | None = None

    def __str__(self) -> str:
        if self.stop is not None:
            return f"{self.path}: bytes {self.number}..{self.stop}"
        return describe_place(str(self.path), self.kind, self.number)


def describe_place(path: str, kind: str, number: int) -> str:
    """`train.jsonl:17`, `list.json: element 17`, `table.parquet: row 17`, `book.txt`, `book.txt: byte 120`."""
    match kind:
        case "jsonl":
            return f"{path}:{number}"
        case "json":
            return f"{path}: element {number}"
        case "parquet" | "arrow" | "hub":
            return f"{path}: row {number}"
        case "line" | "paragraph":
            return f"{path}: byte {number}"
        case _:
            return path


@dataclass(frozen=True)
class RawRecord:
    """What a reader yields: a value, or the fault that kept it from being one.

    Args:
        place: Where it stands.
        value: The parsed record; None beside a fault.
        fault: Why there is no value.
        raw: Bytes of the record, for the rejects file; None where the value is the best there is.
        consumed: Bytes of the file read so far, for progress.
    """

    place: Place
    value: dict[str, Any] | None
    fault: RecordFault | None
    raw: bytes | None
    consumed: int


def shorten(value: Any, limit: int = 60) -> str:
    """A value as it may stand in a one-line message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
