"""Which characters of a rendered conversation are the assistant's.

The conversation is rendered once, whole, and spans are found in that string: by the template's own generation markers;
else by prefix stability (what renders before a turn, and with it, must be a prefix of the whole); else by delimiters
the user names; else not at all, and the record is refused. The content itself is never searched for: an answer equal
to a user's text would be found in the wrong place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from freight.data.read.records import Reason, RecordFault
from freight.data.render.messages import Conversation
from freight.data.render.template import ChatTemplate
from freight.data.render.tokenizer import common_prefix

SHOWN_CHARACTERS = 24
# How reasoning ends: </think>, </seed:think>, </reasoning>, [/THINK], <|end_of_thought|>, <channel|>.
REASONING_END = re.compile(
    r"</[\w:]*(?:think|thought|reason|analysis)\w*>|\[/think\]|<\|/?\w*(?:think|thought|reason)\w*\|>|<channel\|>",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Span:
    """Characters `[start, stop)` that the assistant wrote.

    Args:
        start: First character.
        stop: Behind the last one.
        turn: Index of the message, or None where a template marks several spans per turn.
        open_ended: The turn's end token may follow the span; else the span holds it if there is one.
    """

    start: int
    stop: int
    turn: int | None
    open_ended: bool = False


@dataclass(frozen=True)
class Delimiters:
    """What stands before and behind an assistant's text in the rendered conversation."""

    start: str
    stop: str


def find_spans(
    template: ChatTemplate, conversation: Conversation, turns: Sequence[int], delimiters: Delimiters | None
) -> tuple[str, list[Span]]:
    """Render a conversation and find the spans of some assistant turns.

    Args:
        template: Renders.
        conversation: To render.
        turns: Indices of the assistant messages whose spans are wanted.
        delimiters: Used where the template neither marks generation nor is prefix-stable.

    Returns:
        The rendered text and the spans, in order.

    Raises:
        RecordFault: `template_error`, or `unstable_template` if no way leads to spans that are certain.
    """
    messages, tools = conversation.messages, conversation.tools
    if template.has_generation:
        text, marked = template.render_spans(messages, tools)
        return text, marked_spans(marked, conversation.assistant_turns, turns)
    text = template.render(messages, tools)
    try:
        return text, [stable_span(template, conversation, turn, text) for turn in turns]
    except RecordFault as fault:
        if fault.reason is not Reason.UNSTABLE_TEMPLATE or delimiters is None:
            raise
    found = delimited_spans(text, delimiters, conversation)
    return text, [span for span in found if span.turn in turns]


def marked_spans(marked: Sequence[tuple[int, int]], assistant_turns: Sequence[int], turns: Sequence[int]) -> list[Span]:
    """Spans from generation markers, matched to turns where there is one for each.

    Raises:
        RecordFault: Some turns only are wanted, and the markers do not tell which span belongs to which turn.
    """
    if len(marked) == len(assistant_turns):
        pairs = zip(marked, assistant_turns, strict=True)
        return [Span(start, stop, turn, open_ended=True) for (start, stop), turn in pairs if turn in turns]
    if len(turns) < len(assistant_turns):
        raise RecordFault(
            Reason.UNSTABLE_TEMPLATE,
            "",
            f"the template marks {len(marked)} generation spans for {len(assistant_turns)} assistant turns, so single "
            "turns cannot be left out; put one {% generation %} block around each turn",
        )
    return [Span(start, stop, None, open_ended=True) for start, stop in marked if stop > start]


def stable_span(template: ChatTemplate, conversation: Conversation, turn: int, text: str) -> Span:
    """Span of one assistant turn between two renders of the conversation's beginning.

    Raises:
        RecordFault: `unstable_template`, with the first difference.
    """
    messages, tools = conversation.messages, conversation.tools
    try:
        before = template.render(messages[:turn], tools, add_generation_prompt=True)
        after = text if turn == len(messages) - 1 else template.render(messages[: turn + 1], tools)
    except RecordFault as fault:
        raise RecordFault(
            Reason.UNSTABLE_TEMPLATE, "", f"template cannot render the messages before turn {turn + 1}: {fault.message}"
        ) from None
    for shorter, longer in ((before, after), (after, text)):
        if not longer.startswith(shorter):
            raise unstable(turn, shorter, longer)
    return Span(len(before), len(after), turn)


def unstable(turn: int, prefix: str, text: str) -> RecordFault:
    """The fault of a template that renders a turn otherwise once more messages follow."""
    start = common_prefix(prefix, text)
    stop = start + max(1, min(SHOWN_CHARACTERS, max(len(prefix), len(text)) - start))
    return RecordFault(
        Reason.UNSTABLE_TEMPLATE,
        "",
        f"template is not prefix-stable at turn {turn + 1} (characters {start}..{stop} differ: "
        f"{prefix[start:stop]!r} becomes {text[start:stop]!r}); add {{% generation %}} to the template, or set "
        "data.assistant_start and data.assistant_end",
    )


def delimited_spans(text: str, delimiters: Delimiters, conversation: Conversation) -> list[Span]:
    """Spans between delimiters, left to right, one for each assistant turn; the closing delimiter belongs to them.

    Raises:
        RecordFault: Their number differs from the turns', or one does not hold its turn's content.
    """
    turns = conversation.assistant_turns
    ranges: list[tuple[int, int]] = []
    position = 0
    while (at := text.find(delimiters.start, position)) >= 0:
        start = at + len(delimiters.start)
        end = text.find(delimiters.stop, start)
        position = len(text) if end < 0 else end + len(delimiters.stop)
        ranges.append((start, position))
    if len(ranges) != len(turns):
        raise RecordFault(
            Reason.UNSTABLE_TEMPLATE,
            "",
            f"data.assistant_start {delimiters.start!r} opens {len(ranges)} spans for {len(turns)} assistant turns",
        )
    for turn, (start, stop) in zip(turns, ranges, strict=True):
        content = conversation.messages[turn]["content"]
        if delimiters.start in content or delimiters.stop in content:
            raise RecordFault(
                Reason.UNSTABLE_TEMPLATE, f"messages[{turn}].content", "the text holds an assistant delimiter itself"
            )
        if not carries(text[start:stop].removesuffix(delimiters.stop), content):
            raise RecordFault(
                Reason.UNSTABLE_TEMPLATE, f"messages[{turn}].content", "is not between the assistant delimiters"
            )
    return [Span(start, stop, turn) for turn, (start, stop) in zip(turns, ranges, strict=True)]


def carries(rendered: str, content: str) -> bool:
    """Whether rendered text holds a turn's content, or what is left of it without its reasoning; white space aside."""
    found, wanted = squashed(rendered), squashed(content)
    return wanted in found or (found != "" and found in (after_reasoning(wanted), wanted))


def squashed(text: str) -> str:
    """Text without its white space, which templates trim and tokenizers change."""
    return "".join(text.split())


def after_reasoning(text: str) -> str:
    """What stands behind the last closing tag of reasoning, `</think>` or `[/THINK]`; all of it if there is none."""
    return REASONING_END.split(text)[-1]
