"""JSON Lines and JSON arrays, record by record, each with the number of the line or element it stands on.

Lines end at the byte 10 and nowhere else: U+2028, U+2029 and U+0085 inside a string are data. Memory is a small
multiple of the longest line. Each record is parsed alone: no columns, so no nulls for keys that other records have.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freight.data.read.compressed import open_bytes
from freight.data.read.records import Place, RawRecord, Reason, RecordFault, shorten
from freight.data.read.strict_json import EXCERPT, ParsedFault, StrictDecoder, syntax_fault
from freight.errors import DataError

FOREIGN_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def read_jsonl(path: Path, after: int = -1) -> Iterator[RawRecord]:
    """Yield every non-blank line of a JSON Lines file, parsed or with its fault.

    Args:
        path: The file, perhaps compressed.
        after: Lines up to this number are passed over unparsed.

    Raises:
        DataError: The file is in UTF-16 or UTF-32, or compressed and damaged.
    """
    decoder = StrictDecoder()
    for number, line, consumed in read_lines(path, after):
        yield parse_line(Place(path, "jsonl", number), line, consumed, decoder)


def read_lines(path: Path, after: int = -1) -> Iterator[tuple[int, bytes, int]]:
    """Yield number, bytes without the line end, and position in the file of every non-blank line; see `read_jsonl`."""
    file, position = open_bytes(path)
    with file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = without_mark(line, path)
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if number > after and line.strip(b" \t\r"):
                yield number, line, position()


def parse_line(place: Place, line: bytes, consumed: int, decoder: StrictDecoder) -> RawRecord:
    """One line as a record, or with its fault."""
    try:
        value, fault = as_object(decoder.decode(decode_utf8(line))), None
    except RecordFault as error:
        value, fault = None, error
    return RawRecord(place, value, fault, line, consumed)


def read_json_array(path: Path) -> Iterator[RawRecord]:
    """Yield every element of the array that a JSON file holds.

    Raises:
        DataError: The file is not one array, or broken so that the next element cannot be found.
    """
    content = without_mark(path.read_bytes(), path)
    try:
        text = decode_utf8(content)
    except RecordFault as fault:
        raise DataError(f"{path}: {fault}; save it as UTF-8") from None
    position = skip_space(text, 0)
    if not text.startswith("[", position):
        raise DataError(f"{path}: {explain_no_array(text)}")
    decoder = StrictDecoder()
    number, position = 0, skip_space(text, position + 1)
    while not text.startswith("]", position):
        number += 1
        place = Place(path, "json", number)
        start, value, fault = position, None, None
        try:
            value, position = decoder.decode_at(text, position)
            value = as_object(value)
        except ParsedFault as error:
            fault, position = error, error.end
        except RecordFault as error:
            value, fault = None, error
        except json.JSONDecodeError as error:
            raise DataError(f"{place}: {syntax_fault(text, error.pos, error.msg)}; fix the file") from None
        raw = text[start:position].encode("utf-8")
        yield RawRecord(place, value, fault, raw, len(content) * position // max(1, len(text)))
        position = skip_space(text, position)
        if text.startswith(",", position):
            position = skip_space(text, position + 1)
            if not text.startswith("]", position):
                continue
        elif text.startswith("]", position):
            continue
        raise DataError(f"{place}: {syntax_fault(text, position, 'Expected `,` and an element, or `]`')}; fix the file")
    rest = skip_space(text, position + 1)
    if rest < len(text):
        raise DataError(f"{path}: {syntax_fault(text, rest, 'Extra data after the array')}; fix the file")


def without_mark(content: bytes, path: Path) -> bytes:
    """Remove a UTF-8 byte-order mark at the front; refuse the marks of other encodings."""
    for mark, encoding in FOREIGN_MARKS.items():
        if content.startswith(mark):
            raise DataError(f"{path}: the file is in {encoding}; save it as UTF-8")
    return content.removeprefix(codecs.BOM_UTF8)


def decode_utf8(content: bytes) -> str:
    """Decode, or say which bytes are wrong.

    Raises:
        RecordFault: `invalid_utf8`, with the bytes and their column.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        near = content[max(0, error.start - EXCERPT // 2) : error.start + EXCERPT // 2]
        shown = near.decode("ascii", "backslashreplace").encode("unicode_escape").decode("ascii").replace("\\\\", "\\")
        raise RecordFault(
            Reason.INVALID_UTF8, "", f"{error.reason} at byte {error.start + 1}, near `{shown}`"
        ) from None


def as_object(value: Any) -> dict[str, Any]:
    """The value, if it is an object.

    Raises:
        RecordFault: `not_an_object`.
    """
    if not isinstance(value, dict):
        raise RecordFault(Reason.NOT_AN_OBJECT, "", f"expected an object, got {shorten(value)}")
    return value


def skip_space(text: str, position: int) -> int:
    """Index of the next character that is not JSON's white space."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def explain_no_array(text: str) -> str:
    """What a file that does not begin with `[` seems to be, and what to do."""
    try:
        value = json.loads(text)
    except ValueError:
        first_line = text.lstrip().split("\n", 1)[0]
        if first_line.startswith("{") and first_line.rstrip().endswith("}"):
            return "not a JSON array but one object per line; rename it to .jsonl"
        return "not a JSON array"
    if isinstance(value, dict):
        arrays = [key for key, item in value.items() if isinstance(item, list)]
        if arrays:
            return (
                f"the records must be a top-level array; this is an object with one in `{arrays[0]}`: save that alone"
            )
    return f"the records must be a top-level array, got {shorten(value)}"
