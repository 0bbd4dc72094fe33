"""Whether the tokens that are supervised are what the assistant said: the last look before a record is used.

The decoded tokens are held against each turn's content and the names of the functions it calls, white space aside. A
template may drop reasoning from the front of a turn, up to a closing tag; it may not drop anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freight.data.read.records import Reason, RecordFault
from freight.data.render.masks import TokenMask
from freight.data.render.messages import Conversation
from freight.data.render.spans import after_reasoning, squashed
from freight.data.render.tokenizer import Encoded, Encoder


def check_turns(
    conversation: Conversation, encoded: Encoded, mask: TokenMask, encoder: Encoder, *, thorough: bool
) -> None:
    """Each supervised turn has tokens, and if asked for, they decode to what it says.

    Args:
        conversation: As rendered.
        encoded: Its tokens.
        mask: Which of them are supervised.
        encoder: The tokenizer.
        thorough: Decode; costs about as much as encoding.

    Raises:
        RecordFault: `unstable_template`: the mask would not be what the record says.
    """
    for turn in mask.turns:
        if turn.span.turn is None:
            continue
        content = conversation.messages[turn.span.turn]["content"]
        if content.strip() and turn.start == turn.stop:
            raise fault(turn.span.turn, "the template renders no token of this turn")
        if thorough:
            text = encoder.decode(encoded.ids[turn.start : turn.stop - turn.ends])
            find_turns(conversation, [turn.span.turn], text, encoder)
    if thorough and any(turn.span.turn is None for turn in mask.turns):
        turns = [index for index in conversation.assistant_turns if conversation.weights[index]]
        find_turns(conversation, turns, encoder.decode(encoded.ids[mask.targets]), encoder)


def find_turns(conversation: Conversation, turns: Sequence[int], text: str, encoder: Encoder) -> None:
    """Find what some turns say in the supervised text, one behind the other.

    Raises:
        RecordFault: `unstable_template`: something is missing.
    """
    rest = squashed(text)
    for turn in turns:
        message = conversation.messages[turn]
        at = position_of(message["content"], rest, encoder)
        if at is None:
            raise fault(turn, "the supervised tokens do not decode to this turn's content")
        rest = rest[at:]
        for name in called(message):
            if squashed(name) not in rest:
                raise fault(turn, f"the supervised tokens hold no call of {name!r}")


def position_of(content: str, rest: str, encoder: Encoder) -> int | None:
    """Where a turn's content ends in squashed text; None if it is not there.

    A tokenizer that changes text is given the chance to change the content too.
    """
    for spelled in (lambda: content, lambda: encoder.decode(encoder.encode([content])[0].ids)):
        wanted = squashed(spelled())
        for said in (wanted, after_reasoning(wanted)):
            if said in rest and (said or not wanted):
                return rest.index(said) + len(said)
    return None


def called(message: dict[str, Any]) -> list[str]:
    """Names of the functions that a message calls."""
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


def fault(turn: int, message: str) -> RecordFault:
    """The fault of a turn."""
    return RecordFault(Reason.UNSTABLE_TEMPLATE, f"messages[{turn}].content", message)


def unwritten(conversation: Conversation, text: str) -> list[int]:
    """User and system messages whose text is not in the rendered conversation, white space aside."""
    found = squashed(text)
    return [
        index
        for index, message in enumerate(conversation.messages)
        if message["role"] in ("user", "system") and squashed(message["content"]) not in found
    ]
