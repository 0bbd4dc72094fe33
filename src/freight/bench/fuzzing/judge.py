"""What a used record must have taught, read from its JSON by a second, plainer reader; and whether books add up.

It knows nothing of Freight's readers: a record that Freight uses and that this reader cannot read is a finding, as is a
record whose supervised text is not exactly the assistant's texts and turn ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freight.bench.fuzzing.tokenizers import Style
from freight.data.documents import Documents
from freight.data.render.tokenizer import Encoder

ASSISTANT = ("assistant", "gpt", "bot", "model")
SPEAKERS = (*ASSISTANT, "system", "developer", "user", "human", "tool", "function", "observation", "ipython")


class Unreadable(Exception):
    """The record is none that may be used."""


def answers(record: Any, name: str) -> list[str]:
    """Texts that a record of a format wants learned.

    Raises:
        Unreadable: The record is not of the format.
    """
    if not isinstance(record, dict):
        raise Unreadable("not an object")
    match name:
        case "messages":
            return _learned(record.get("messages"), "role", "content")
        case "conversations":
            return _learned(record.get("conversations"), "from", "value")
        case "prompt_completion" if isinstance(record.get("completion"), list):
            return _learned(record["completion"], "role", "content")
        case "prompt_completion":
            return [_text(record.get("completion"))]
        case "alpaca":
            history = record.get("history") or []
            told = [_text(pair[1]) for pair in history]
            return [*told, _text(record["output"] if "output" in record else record.get("response"))]
        case _:
            return [_text(record.get("text"))]


def _learned(turns: Any, role_key: str, text_key: str) -> list[str]:
    if not isinstance(turns, list) or not turns:
        raise Unreadable("no turns")
    texts: list[str] = []
    for turn in turns:
        if not isinstance(turn, dict) or turn.get(role_key) not in SPEAKERS:
            raise Unreadable("no turn")
        calls = turn.get("tool_calls") if turn[role_key] in ASSISTANT else None
        said = _text(turn.get(text_key), absent=bool(calls))
        if turn[role_key] in ASSISTANT and turn.get("weight") in (None, 1):
            texts.append(said + "".join(_call(call) for call in calls or []))
    return texts


def _call(call: Any) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    return f"<call>{json.dumps({'name': function['name'], 'arguments': parsed}, ensure_ascii=False)}</call>"


def _text(value: Any, *, absent: bool = False) -> str:
    if isinstance(value, str):
        return value
    if value is None and absent:
        return ""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(part["text"] for part in value)
    raise Unreadable("no text")


def numbered_lines(content: bytes) -> dict[int, bytes]:
    """Lines of a JSON Lines file that hold a record, by number."""
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return {number: line for number, line in enumerate(lines, start=1) if line.strip(b" \t\r")}


def lost_lines(documents: Documents, lines: dict[int, bytes], rejects: Path) -> str | None:
    """Says which lines are neither used nor rejected, or both; None if the books add up."""
    used = set(used_lines(documents))
    rejected: list[int] = []
    if rejects.exists():
        rejected = [json.loads(line)["line"] for line in rejects.read_bytes().split(b"\n") if line]
    metadata = documents.metadata
    if sorted([*used, *rejected]) != sorted(lines):
        return f"lines {sorted(lines)}: used {sorted(used)}, rejected {rejected}"
    counted = (metadata["records_read"], metadata["records_used"], sum(metadata["skipped"].values()))
    if counted != (len(lines), len(used), len(rejected)):
        return f"{len(lines)} lines, {len(used)} used, {len(rejected)} rejected; counted as {counted}"
    return None


def used_lines(documents: Documents) -> list[int]:
    """Line of each document."""
    return [int(documents.origin(index).rsplit(":", 1)[1]) for index in range(len(documents))]


def wrong_target(
    documents: Documents, line: int, record: Any, name: str, style: Style | None, encoder: Encoder
) -> str | None:
    """Says how the supervised text of a record differs from what it must teach; None if it is exactly that.

    Args:
        documents: All of them.
        line: The record's.
        record: As the plain parser reads it.
        name: Format.
        style: Its template; None where the template is spoiled and only the answers' presence can be asked for.
        encoder: The tokenizer, which may normalise: what it makes of a text is what is compared.
    """
    pieces = [documents[index] for index, at in enumerate(used_lines(documents)) if at == line]
    try:
        wanted = answers(record, name)
    except (Unreadable, TypeError, KeyError, AttributeError, IndexError, ValueError) as fault:
        return f"a record that cannot be read is used: {fault!r}"
    if name == "text" or (name == "prompt_completion" and isinstance(record["completion"], str)):
        # The very first token has nothing before it to be predicted from.
        found = [int(i) for piece in pieces for i in (piece.ids if name == "text" else piece.ids[piece.loss_mask])]
        rest = [int(i) for i in encoder.encode(wanted)[0].ids[1:]]
        whole = any(found[at : at + len(rest)] == rest for at in range(len(found)))
        return None if whole else f"supervised {encoder.decode(found)!r}, not {wanted[0]!r}"
    ids = [int(i) for piece in pieces for i in piece.ids[piece.loss_mask]]
    found = encoder.decode(ids)
    if style is None:
        expected = [normal(text.split("</think>")[-1], encoder) for text in wanted]
        return None if holds(found, expected) else f"supervised {found!r} lacks one of {expected}"
    if style.rewrites:
        wanted = [text.split("</think>")[-1] for text in wanted]
        expected = [normal(style.answer(text), encoder) for text in wanted]
        return None if holds(found, expected) else f"supervised {found!r} lacks one of {expected}"
    whole = [int(i) for i in encoder.encode(["".join(style.answer(text) for text in wanted)])[0].ids]
    # An answer that a document begins with has a first token that nothing stands before.
    begins = len(ids) > 0 and [int(pieces[0].ids[0]), *ids] == whole and bool(pieces[0].loss_mask[1])
    return None if ids == whole or begins else f"supervised {found!r}, not {encoder.decode(whole)!r}"


def normal(text: str, encoder: Encoder) -> str:
    """A text as the tokenizer gives it back."""
    return encoder.decode(encoder.encode([text])[0].ids)


def holds(found: str, parts: Sequence[str]) -> bool:
    """Whether all parts stand in a text, in order, white space aside."""
    squashed, position = "".join(found.split()), 0
    for part in parts:
        wanted = "".join(part.split())
        at = squashed.find(wanted, position)
        if at < 0:
            return False
        position = at + len(wanted)
    return True
