"""Messages of a chat in one spelling: roles, content, tool calls, and which assistant turns are to be learned.

Nothing is made up: absent content is legal only beside tool calls and becomes "", so the words None and null never
enter the text; arguments given as a JSON string are parsed once, so templates never escape them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from freight.data.read.records import Reason, RecordFault, shorten
from freight.data.read.strict_json import StrictDecoder

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
# Names under which others write what an assistant thought before it spoke.
REASONING = ("reasoning_content", "reasoning", "thinking")
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING, "weight")
# What a template may leave out: it names things, but nobody says it.
LABELS = ("name", "tool_call_id")


@dataclass(frozen=True)
class Conversation:
    """A chat in canonical form.

    Args:
        messages: `{role, content, ...}` with text contents, as templates expect them.
        weights: 1 for assistant turns that are learned, else 0; one per message.
        tools: JSON schemas of tools, if any.
    """

    messages: tuple[dict[str, Any], ...]
    weights: tuple[int, ...]
    tools: list[dict[str, Any]] | None

    @property
    def assistant_turns(self) -> list[int]:
        """Indices of assistant messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def texts(self) -> list[str]:
        """Contents, as the record has them."""
        return [message["content"] for message in self.messages]

    def without(self, start: int, stop: int) -> Conversation:
        """The conversation without messages `[start, stop)`."""
        return Conversation(
            self.messages[:start] + self.messages[stop:], self.weights[:start] + self.weights[stop:], self.tools
        )


def read_messages(
    messages: Any,
    field: str,
    ignored: Callable[[str], None],
    *,
    tools: list[dict[str, Any]] | None = None,
    offset: int = 0,
) -> Conversation:
    """Check a list of messages and bring it to canonical form.

    Args:
        messages: What the record has.
        field: Its name, for messages.
        ignored: Told of keys that are not used.
        tools: Of the record.
        offset: Messages in front that the record's list does not have.

    Raises:
        RecordFault: Names the field.
    """
    if not isinstance(messages, list):
        raise RecordFault(Reason.WRONG_TYPE, field, f"expected a list of messages, got {shorten(messages)}")
    if not messages:
        raise RecordFault(Reason.EMPTY, field, "there are no messages")
    canonical: list[dict[str, Any]] = []
    weights: list[int] = []
    for index, message in enumerate(messages):
        where = f"{field}[{index - offset}]" if index >= offset else "system"
        canonical.append(read_message(message, where, ignored))
        weights.append(read_weight(message, canonical[-1]["role"], where))
    return Conversation(tuple(canonical), tuple(weights), tools)


def read_message(message: Any, where: str, ignored: Callable[[str], None]) -> dict[str, Any]:
    """One message in canonical form, without its weight.

    Raises:
        RecordFault: Names the field.
    """
    if not isinstance(message, dict):
        raise RecordFault(Reason.WRONG_TYPE, where, f"expected an object, got {shorten(message)}")
    if "role" not in message:
        raise RecordFault(Reason.MISSING_FIELD, f"{where}.role", f"the message has {shorten(sorted(message))}")
    role = message["role"]
    if not isinstance(role, str) or role not in ROLES:
        raise RecordFault(
            Reason.UNKNOWN_ROLE, f"{where}.role", f"expected one of {', '.join(ROLES)}; got {shorten(role)}"
        )
    canonical: dict[str, Any] = {"role": ROLES[role]}
    calls = message.get("tool_calls")
    if calls:
        if canonical["role"] != "assistant":
            raise RecordFault(Reason.BAD_TOOL_CALL, f"{where}.tool_calls", f"only an assistant calls tools, not {role}")
        canonical["tool_calls"] = read_tool_calls(calls, f"{where}.tool_calls")
    canonical["content"] = join_content(message.get("content"), f"{where}.content", absent="" if calls else None)
    for key in (*LABELS, *REASONING):
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise RecordFault(Reason.WRONG_TYPE, f"{where}.{key}", f"expected text, got {shorten(value)}")
        name = REASONING[0] if key in REASONING else key
        if canonical.setdefault(name, value) != value:
            raise RecordFault(Reason.WRONG_TYPE, f"{where}.{key}", f"is not what `{name}` says; keep one of the two")
    for key, value in message.items():
        if key not in MESSAGE_KEYS and value is not None:
            ignored(f"messages.{key}")
    return canonical


def read_weight(message: dict[str, Any], role: str, where: str) -> int:
    """1 for an assistant turn, unless its `weight` says 0.

    Raises:
        RecordFault: Another value, or a weight on another role.
    """
    weight = message.get("weight")
    if weight is None:
        return int(role == "assistant")
    if role != "assistant":
        raise RecordFault(Reason.WRONG_TYPE, f"{where}.weight", f"only assistant turns have a weight, not {role}")
    if weight not in (0, 1):
        raise RecordFault(Reason.WRONG_TYPE, f"{where}.weight", f"expected 0 or 1, got {shorten(weight)}")
    return int(weight)


def join_content(content: Any, where: str, *, absent: str | None = None) -> str:
    """Content as text.

    Args:
        content: Text, a list of text parts, or None.
        where: Field, for messages.
        absent: What None becomes; None itself where content is required.

    Raises:
        RecordFault: Another type, or a part that is not text.
    """
    if isinstance(content, str):
        return content
    if content is None:
        if absent is None:
            raise RecordFault(
                Reason.MISSING_FIELD, where, "missing or null, legal only beside an assistant's tool_calls"
            )
        return absent
    if not isinstance(content, list):
        raise RecordFault(Reason.WRONG_TYPE, where, f"expected text, list of parts or null, got {shorten(content)}")
    return "".join(read_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def read_part(part: Any, where: str) -> str:
    """The text of a `{type: text, text}` part.

    Raises:
        RecordFault: Any other part.
    """
    if not isinstance(part, dict):
        raise RecordFault(Reason.WRONG_TYPE, where, f"expected an object, got {shorten(part)}")
    if part.get("type") != "text":
        raise RecordFault(Reason.UNSUPPORTED_PART, where, f"only parts of type text are supported, got {shorten(part)}")
    if not isinstance(part.get("text"), str):
        raise RecordFault(Reason.WRONG_TYPE, f"{where}.text", f"expected text, got {shorten(part.get('text'))}")
    return part["text"]


def read_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects.

    Raises:
        RecordFault: `bad_tool_call`.
    """
    if not isinstance(calls, list):
        raise RecordFault(Reason.BAD_TOOL_CALL, where, f"expected a list of calls, got {shorten(calls)}")
    return [read_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def read_tool_call(call: Any, where: str) -> dict[str, Any]:
    """One call, `{function: {name, arguments}}`; the bare function is accepted too."""
    if not isinstance(call, dict):
        raise RecordFault(Reason.BAD_TOOL_CALL, where, f"expected an object, got {shorten(call)}")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordFault(
            Reason.BAD_TOOL_CALL, f"{where}.function", f"expected name and arguments, got {shorten(function)}"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = StrictDecoder().decode(arguments)
        except RecordFault as fault:
            raise RecordFault(Reason.BAD_TOOL_CALL, f"{where}.function.arguments", fault.message) from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RecordFault(
            Reason.BAD_TOOL_CALL, f"{where}.function.arguments", f"expected an object, got {shorten(arguments)}"
        )
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **identity, "function": {"name": function["name"], "arguments": arguments}}


def read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """A record's `tools`: a list of JSON schemas, or that list as a JSON string.

    Raises:
        RecordFault: Anything else.
    """
    if isinstance(tools, str) and tools.strip():
        try:
            tools = StrictDecoder().decode(tools)
        except RecordFault as fault:
            raise RecordFault(fault.reason, "tools", fault.message) from None
    if tools is None or tools in ("", []):
        return None
    if not isinstance(tools, list) or any(not isinstance(tool, dict) for tool in tools):
        raise RecordFault(Reason.WRONG_TYPE, "tools", f"expected a list of JSON schemas, got {shorten(tools)}")
    return tools


def first_group(messages: Sequence[dict[str, Any]]) -> tuple[int, int] | None:
    """Range of the oldest user..assistant group, which ends where the next user turn begins; None if it is the last."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return (users[0], users[1]) if len(users) > 1 else None


def for_template(conversation: Conversation, mentions: Callable[[str], bool]) -> Conversation:
    """The conversation with the roles and keys that a template knows.

    Args:
        conversation: As its record has it.
        mentions: Whether the template has a word.

    Raises:
        RecordFault: The template would leave tools, tool calls or reasoning out without a word.
    """
    if conversation.tools and not mentions("tools"):
        raise RecordFault(Reason.TEMPLATE_ERROR, "tools", "the chat template renders no tools")
    return Conversation(
        tuple(message_for_template(message, index, mentions) for index, message in enumerate(conversation.messages)),
        conversation.weights,
        conversation.tools,
    )


def message_for_template(message: dict[str, Any], index: int, mentions: Callable[[str], bool]) -> dict[str, Any]:
    """One message in the words that a template knows.

    Raises:
        RecordFault: See `for_template`.
    """
    if "tool_calls" in message and not mentions("tool_calls"):
        raise RecordFault(
            Reason.TEMPLATE_ERROR, f"messages[{index}].tool_calls", "the chat template renders no tool calls"
        )
    if REASONING[0] in message:
        if not any(mentions(name) for name in REASONING):
            raise RecordFault(
                Reason.TEMPLATE_ERROR,
                f"messages[{index}].{REASONING[0]}",
                "the chat template renders no reasoning; use one that does, or write it into content",
            )
        message = {**message, **{name: message[REASONING[0]] for name in REASONING if mentions(name)}}
    if message["role"] == "developer" and not mentions("developer"):
        message = {**message, "role": "system"}
    return message


def left_out(conversation: Conversation, mentions: Callable[[str], bool]) -> set[str]:
    """Labels that messages have and a template does not write."""
    return {
        f"messages.{label}"
        for label in LABELS
        if not mentions(label) and any(label in message for message in conversation.messages)
    }
