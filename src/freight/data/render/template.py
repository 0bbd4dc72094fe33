"""Chat templates: found, checked, and rendered to text in a sandbox.

What a template would leave out silently (tools, tool calls, reasoning, unknown arguments) is refused. What it marks as
the assistant's with `{% generation %}` is found by rendering once more with marks at both ends of such blocks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateSyntaxError
from jinja2.nodes import TemplateData

from freight.data.read.records import Reason, RecordFault
from freight.data.render.sandbox import CAPTURES, START, STOP, Sandbox, TemplateLimit, characters, written
from freight.data.render.tokenizer import digest
from freight.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHIPPED = ("chatml", "plain")
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class ChatTemplate:
    """A Jinja chat template with its arguments.

    Args:
        text: The template.
        special_tokens: `bos_token`, `eos_token`, ... as templates see them.
        kwargs: `data.template_kwargs`.

    Raises:
        DataError: It cannot be compiled, an argument that it never mentions, or it does too much for a short chat.
    """

    def __init__(self, text: str, special_tokens: dict[str, str], kwargs: dict[str, Any]) -> None:
        self.text = text
        self._arguments = (special_tokens, kwargs)
        self._variables = {**special_tokens, **kwargs}
        self._words = frozenset(re.findall(r"\w+", text))
        self.hash = digest([text, self._variables])
        for name in kwargs:
            if name in RESERVED or not self.mentions(name):
                raise DataError(f"data.template_kwargs: the chat template has no argument {name!r}; leave it out")
        self._plain = compiled(text, marked=False)
        self.has_generation, self._captures_marks = marks_of(text) if self.mentions("generation") else (False, False)
        self._marked = compiled(text, marked=True) if self.has_generation else self._plain
        with suppress(RecordFault):  # it may want other messages; one that never works is told by its first record
            self.render([{"role": "user", "content": "x"}])

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.text, *self._arguments)

    def mentions(self, name: str) -> bool:
        """Whether a word occurs in the template at all."""
        return name in self._words

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render a conversation.

        Raises:
            RecordFault: `template_error`, with the template's own words.
            DataError: The template does far more than writing down the conversation.
        """
        return self._render(self._plain, messages, tools, add_generation_prompt)

    def render_spans(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation, with the character ranges inside `{% generation %}`.

        Raises:
            RecordFault: `template_error`, or `unstable_template` where the blocks' ends cannot be told.
            DataError: The template does far more than writing down the conversation.
        """
        text, spans = spans_between(self._render(self._marked, messages, tools, False))
        if self._captures_marks and text != self._render(self._plain, messages, tools, False):
            raise RecordFault(
                Reason.UNSTABLE_TEMPLATE, "", "the template changes a text with {% generation %} in it once it is made"
            )
        return text, spans

    def _render(self, template: Template, messages: Sequence[dict[str, Any]], tools: Any, prompt: bool) -> str:
        environment = template.environment
        assert isinstance(environment, Sandbox)
        environment.begin(characters(messages) + characters(tools))
        variables = {**self._variables, "messages": list(messages), "tools": tools, "documents": None}
        try:
            text = written(template, {**variables, "add_generation_prompt": prompt})
            text.encode("utf-8")
        except TemplateLimit as error:
            raise DataError(f"the chat template does too much for one conversation: {error}") from None
        except Exception as error:  # a stranger's program: whatever it raises, it is the template's
            words = " ".join(str(error).split()) or type(error).__name__
            raise RecordFault(Reason.TEMPLATE_ERROR, "", f"the chat template says: {words}") from error
        return text


def compiled(text: str, *, marked: bool) -> Template:
    """The template, ready to run.

    Raises:
        DataError: It has a syntax error.
    """
    try:
        return Sandbox(marked=marked).from_string(text)
    except TemplateSyntaxError as error:
        raise DataError(f"the chat template has a syntax error in line {error.lineno}: {error.message}") from None
    except Exception as error:  # Jinja hands on what Python says of the code it made
        raise DataError(f"the chat template cannot be compiled: {' '.join(str(error).split())}") from None


def marks_of(text: str) -> tuple[bool, bool]:
    """Whether a template marks what the assistant says, and whether it keeps some of that for later."""
    tree = Sandbox(marked=True).parse(text)
    marks = [data for data in tree.find_all(TemplateData) if data.data == START]
    kept = {id(data) for capture in tree.find_all(CAPTURES) for data in capture.find_all(TemplateData)}
    return bool(marks), any(id(data) in kept for data in marks)


def spans_between(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Text without the marks, and the ranges that stood between them.

    Raises:
        RecordFault: `unstable_template`: a block inside another, or one that is left half-way.
    """
    pieces = re.split(f"({START}|{STOP})", text)
    marks, said = pieces[1::2], pieces[0::2]
    if marks != [START, STOP] * (len(marks) // 2):
        raise RecordFault(Reason.UNSTABLE_TEMPLATE, "", "the template's {% generation %} blocks stand in each other")
    edges = [0]
    for piece in said:
        edges.append(edges[-1] + len(piece))
    return "".join(said), [(edges[index + 1], edges[index + 2]) for index in range(0, len(marks), 2)]


def load_chat_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, kwargs: dict[str, Any]
) -> ChatTemplate | None:
    """The template that a run uses, or None if there is none.

    Args:
        tokenizer: Gives the template if no other is named, and its special tokens.
        chat_template: `data.chat_template`: `chatml`, `plain`, a file, the text itself, or None.
        kwargs: `data.template_kwargs`.

    Raises:
        DataError: No such file, or a template that cannot be used.
    """
    text = template_text(tokenizer) if chat_template is None else named_template(chat_template)
    if text is None:
        return None
    special_tokens = {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }
    return ChatTemplate(text, special_tokens, kwargs)


def template_text(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The tokenizer's own template; of several, the default."""
    own = tokenizer.chat_template
    if isinstance(own, dict):
        if "default" not in own:
            raise DataError(f"the tokenizer has chat templates {', '.join(own)} but no default; set data.chat_template")
        return own["default"]
    return own


def named_template(name: str) -> str:
    """Text of a shipped template, of a file, or given as it is."""
    if name in SHIPPED:
        return files("freight.data.render").joinpath("templates", f"{name}.jinja").read_text(encoding="utf-8")
    if "{%" in name or "{{" in name:
        return name
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            f"data.chat_template: {name!r} is neither a file nor a template; shipped ones: {', '.join(SHIPPED)}"
        )
    return path.read_text(encoding="utf-8")
