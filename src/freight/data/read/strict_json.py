"""JSON, strictly: what the standard parser lets through and a record must not contain is a fault with its place.

Python's parser takes NaN, Infinity, repeated keys (last wins) and lone surrogates. Each of these changes data silently
or breaks later, far from its line; here they are refused where they stand. The C scanner still does the work.
"""

from __future__ import annotations

import json
import re
from typing import Any

from freight.data.read.records import Reason, RecordFault

EXCERPT = 40
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class StrictDecoder:
    """Parses one value at a time; faults that leave the value parsable are found after it."""

    def __init__(self) -> None:
        self._fault: RecordFault | None = None
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=self._constant)

    def decode(self, text: str) -> Any:
        """Parse text that is one value.

        Raises:
            RecordFault: It is not JSON, or JSON that a record must not contain.
        """
        try:
            value, end = self.decode_at(text, len(text) - len(text.lstrip(" \t\r\n")))
        except json.JSONDecodeError as error:
            raise syntax_fault(text, error.pos, error.msg) from None
        rest = text[end:].lstrip(" \t\r\n")
        if rest:
            raise syntax_fault(text, len(text) - len(rest), "Extra data")
        return value

    def decode_at(self, text: str, start: int) -> tuple[Any, int]:
        """Parse the value that begins at `start`; returns it and where it ends.

        Raises:
            json.JSONDecodeError: No value can be parsed there, nor can its end be known.
            RecordFault: The value was parsed but must not be used; `fault.end` says where it ends.
        """
        self._fault = None
        try:
            value, end = self._decoder.raw_decode(text, start)
        except RecursionError:
            raise json.JSONDecodeError("Nested too deeply", text, start) from None
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # an integer of more digits than Python converts
            raise json.JSONDecodeError(str(error).split(";")[0], text, start) from None
        if self._fault is None and SURROGATE_ESCAPE.search(text, start, end):
            self._fault = surrogate_fault(value)
        if self._fault is not None:
            raise ParsedFault(self._fault, end)
        return value, end

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            keys = [key for key, _ in pairs]
            repeated = next(key for key in keys if keys.count(key) > 1)
            self._fault = self._fault or RecordFault(
                Reason.DUPLICATE_KEY, repeated, "the key stands more than once in one object; keep one"
            )
        return value

    def _constant(self, name: str) -> None:
        self._fault = self._fault or RecordFault(Reason.INVALID_JSON, "", f"{name} is not JSON; write null or a number")


class ParsedFault(RecordFault):
    """A fault inside a value whose end is known, so that reading can go on behind it."""

    def __init__(self, fault: RecordFault, end: int) -> None:
        super().__init__(fault.reason, fault.field, fault.message)
        self.end = end


def syntax_fault(text: str, position: int, message: str) -> RecordFault:
    """`invalid_json` with the column, and the characters around it escaped."""
    start = max(0, position - EXCERPT // 2)
    excerpt = text[start : start + EXCERPT].encode("unicode_escape").decode("ascii")
    return RecordFault(Reason.INVALID_JSON, "", f"{message} at column {position + 1}, near `{excerpt}`")


def surrogate_fault(value: Any) -> RecordFault | None:
    """A fault if any string of the value holds half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        return RecordFault(Reason.INVALID_JSON, "", f"\\u{code:04x} is half of a surrogate pair and no character")
    return None
