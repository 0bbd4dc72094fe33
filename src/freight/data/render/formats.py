"""Record formats: which one a source has, and each turned into one of three plain shapes.

A chat of any spelling becomes a `Conversation`; prompt and completion as text stay apart (`PromptCompletion`), since
joined they could merge into other tokens than at generation; everything else is `Text`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from freight.config.schema import Format
from freight.data.read.records import Place, Reason, RecordFault, shorten
from freight.data.render.messages import Conversation, join_content, read_messages, read_tools
from freight.errors import DataError

DETECTION_RECORDS = 100

# In the order in which detection tries them: the keys of which every record must have one of each group.
REQUIRED: dict[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "conversations": (("conversations",),),
    "prompt_completion": (("prompt",), ("completion",)),
    "alpaca": (("instruction",), ("output", "response")),
    "text": (("text",),),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "messages": ("tools",),
    "conversations": ("system", "tools"),
    "prompt_completion": ("system",),
    "alpaca": ("input", "context", "system", "history"),
    "text": (),
}
FIELD_NAMES = sorted({key for f in REQUIRED for key in (*(k for group in REQUIRED[f] for k in group), *OPTIONAL[f])})


@dataclass(frozen=True)
class PromptCompletion:
    """Two texts that are tokenised apart; only the second is supervised."""

    prompt: str
    completion: str

    @property
    def texts(self) -> list[str]:
        """Its texts, as the record has them."""
        return [self.prompt, self.completion]


@dataclass(frozen=True)
class Text:
    """Plain text, all of it supervised."""

    text: str

    @property
    def texts(self) -> list[str]:
        """Its text, as the record has it."""
        return [self.text]


Sample = Conversation | PromptCompletion | Text


def rename_fields(record: dict[str, Any], fields: dict[str, str]) -> dict[str, Any]:
    """The record under canonical names; a renamed column hides a column of the canonical name."""
    if not fields:
        return record
    columns = set(fields.values())
    renamed = {key: value for key, value in record.items() if key not in columns and key not in fields}
    return {**renamed, **{name: record[column] for name, column in fields.items() if column in record}}


def check_field_names(fields: dict[str, str], source: str) -> None:
    """Refuse names that no format has.

    Raises:
        DataError: Names the unknown field and the nearest known one.
    """
    for name in fields:
        if name not in FIELD_NAMES:
            near = get_close_matches(name, FIELD_NAMES, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(FIELD_NAMES)}"
            raise DataError(f"{source}: data.fields has {name!r}, which no format has{hint}")


def has_keys(record: dict[str, Any], name: str) -> bool:
    """Whether a record has all keys that a format requires."""
    return all(any(key in record for key in group) for group in REQUIRED[name])


def detect_format(records: Iterable[tuple[Place, dict[str, Any]]], source: str) -> Format:
    """The first format whose required keys are in every one of the records.

    Args:
        records: The first records of a source, under canonical names, that could be parsed; at least one.
        source: Its path, for messages.

    Raises:
        DataError: No format fits all; lists the keys seen with one example each, or the known formats if none fits any.
    """
    seen = list(records)
    for name in REQUIRED:
        if all(has_keys(record, name) for _, record in seen):
            return name  # pyright: ignore[reportReturnType]
    if not any(has_keys(record, name) for _, record in seen for name in REQUIRED):
        place, record = seen[0]
        known = ", ".join(" + ".join(" or ".join(keys) for keys in groups) for groups in REQUIRED.values())
        raise DataError(
            f"{source}: no known format; {place} has the keys {shorten(sorted(record))}, and a record needs one of: "
            f"{known}. Give columns their names in data.fields, for example {{prompt: question, completion: answer}}"
        )
    raise DataError(f"{source}: {explain_undetected(seen)}; set data.format (or the source's) and data.fields")


def explain_undetected(seen: Sequence[tuple[Place, dict[str, Any]]]) -> str:
    """Which formats the records vote for, with one example of each vote."""
    votes: dict[str, tuple[Place, dict[str, Any]]] = {}
    for place, record in seen:
        fitting = next((name for name in REQUIRED if has_keys(record, name)), "no known format")
        votes.setdefault(fitting, (place, record))
    described = [f"{name} at {place} with keys {shorten(sorted(record))}" for name, (place, record) in votes.items()]
    return f"the first {len(seen)} records do not share a format: {'; '.join(described)}"


def convert(record: dict[str, Any], name: str, ignored: Callable[[str], None]) -> Sample:
    """Turn a record of a known format into its plain shape.

    Args:
        record: Under canonical names.
        name: The source's format.
        ignored: Told of every key that is not used.

    Raises:
        RecordFault: The record is not of the format.
    """
    for group in REQUIRED[name]:
        if not any(key in record for key in group):
            raise RecordFault(Reason.MISSING_FIELD, group[0], f"the record has only {shorten(sorted(record))}")
    known = {*(key for group in REQUIRED[name] for key in group), *OPTIONAL[name]}
    for key in record:
        if key not in known:
            ignored(key)
    match name:
        case "messages":
            return read_messages(record["messages"], "messages", ignored, tools=read_tools(record.get("tools")))
        case "conversations":
            return from_conversations(record, ignored)
        case "prompt_completion":
            return from_prompt_completion(record, ignored)
        case "alpaca":
            return from_alpaca(record)
        case _:
            return from_text(record)


def from_conversations(record: dict[str, Any], ignored: Callable[[str], None]) -> Conversation:
    """ShareGPT: `conversations: [{from, value}]`."""
    turns = record["conversations"]
    if not isinstance(turns, list):
        raise RecordFault(Reason.WRONG_TYPE, "conversations", f"expected a list of turns, got {shorten(turns)}")
    messages: list[Any] = system_message(record)
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise RecordFault(Reason.WRONG_TYPE, f"conversations[{index}]", f"expected an object, got {shorten(turn)}")
        if "from" not in turn:
            raise RecordFault(Reason.MISSING_FIELD, f"conversations[{index}].from", f"the turn has {shorten(turn)}")
        # A stray `role` or `content` beside them must not replace what the turn says.
        rest = {key: value for key, value in turn.items() if key not in ("from", "value", "role", "content")}
        messages.append({"role": turn["from"], "content": turn.get("value"), **rest})
        for key in ("role", "content"):
            if turn.get(key) is not None:
                ignored(f"conversations.{key}")
    tools = read_tools(record.get("tools"))
    try:
        return read_messages(messages, "conversations", ignored, tools=tools, offset=len(messages) - len(turns))
    except RecordFault as fault:
        field = fault.field.replace("].content", "].value").replace("].role", "].from")
        raise RecordFault(fault.reason, field, fault.message) from None


def from_prompt_completion(record: dict[str, Any], ignored: Callable[[str], None]) -> Sample:
    """Both text, or both message lists, of which only the completion's assistant turns are supervised."""
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        system = system_message(record)
        begins = [*system, *prompt]
        before = read_messages(begins, "prompt", ignored, offset=len(system)) if begins else None
        after = read_messages(completion, "completion", ignored)
        silent = (0,) * len(before.messages) if before else ()
        return Conversation((*(before.messages if before else ()), *after.messages), (*silent, *after.weights), None)
    prompt, completion = text_field(record, "prompt"), text_field(record, "completion")
    if record.get("system"):
        raise RecordFault(Reason.WRONG_TYPE, "system", "needs prompt and completion as message lists; put it in prompt")
    if not prompt and not completion:
        raise RecordFault(Reason.EMPTY, "completion", "prompt and completion are both empty")
    return PromptCompletion(prompt, completion)


def from_alpaca(record: dict[str, Any]) -> Conversation:
    """`instruction`, blank line, `input`; `history` becomes earlier turns."""
    answer = text_field(record, "output" if "output" in record else "response")
    extra = text_field(record, "input" if "input" in record else "context", optional=True)
    question = text_field(record, "instruction")
    messages = system_message(record)
    history = record.get("history") or []
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise RecordFault(Reason.WRONG_TYPE, "history", f"expected [[question, answer], ...], got {shorten(history)}")
    for asked, answered in history:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    messages += [
        {"role": "user", "content": f"{question}\n\n{extra}" if extra else question},
        {"role": "assistant", "content": answer},
    ]
    return read_messages(messages, "turns", lambda key: None)


def from_text(record: dict[str, Any]) -> Text:
    """One text that is not empty."""
    text = text_field(record, "text")
    if not text:
        raise RecordFault(Reason.EMPTY, "text", "the text is empty")
    return Text(text)


def text_field(record: dict[str, Any], field: str, *, optional: bool = False) -> str:
    """A field that must be text; missing or null is "" where it is optional."""
    value = record.get(field)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise RecordFault(Reason.WRONG_TYPE, field, f"expected text, got {shorten(value)}")
    return value


def system_message(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The record's `system` as a first message, if it has one."""
    system = record.get("system")
    return [{"role": "system", "content": join_content(system, "system")}] if system else []
