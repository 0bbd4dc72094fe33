"""Chat templates: found, checked, and rendered to text in transformers' sandbox.

A template is a program from a stranger; it is run by `render_jinja_template`, in an immutable sandboxed environment
that sees plain JSON only. What a template would leave out silently (tools, tool calls, unknown arguments) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from freight.data.records import Reason, RecordFault
from freight.data.tokenizer import digest
from freight.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
SHIPPED = ("chatml", "plain")
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class ChatTemplate:
    """A Jinja chat template with its arguments.

    Args:
        text: The template.
        special_tokens: `bos_token`, `eos_token`, ... as templates see them.
        kwargs: `data.template_kwargs`.

    Raises:
        DataError: A syntax error, or an argument that the template never mentions.
    """

    def __init__(self, text: str, special_tokens: dict[str, str], kwargs: dict[str, Any]) -> None:
        self.text = text
        self._variables = {**special_tokens, **kwargs}
        self.has_generation = GENERATION.search(text) is not None
        self.hash = digest([text, self._variables])
        for name in kwargs:
            if name in RESERVED or not self.mentions(name):
                raise DataError(f"data.template_kwargs: the chat template has no argument {name!r}; leave it out")
        try:
            self.render([{"role": "user", "content": "x"}])
        except RecordFault as fault:
            if isinstance(fault.__cause__, TemplateSyntaxError):
                raise DataError(f"the chat template has a syntax error: {fault.message}") from None

    def mentions(self, name: str) -> bool:
        """Whether a word occurs in the template at all."""
        return re.search(rf"\b{re.escape(name)}\b", self.text) is not None

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
        """
        return self._render(messages, tools, add_generation_prompt, spans=False)[0]

    def render_spans(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation, with the character ranges inside `{% generation %}`.

        Raises:
            RecordFault: `template_error`.
        """
        return self._render(messages, tools, False, spans=True)

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Any, prompt: bool, *, spans: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            rendered, ranges = render_jinja_template(  # pyright: ignore[reportGeneralTypeIssues]
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=spans,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise RecordFault(Reason.TEMPLATE_ERROR, "", f"the chat template says: {error}") from error
        return rendered[0], [(int(start), int(stop)) for start, stop in ranges[0]] if spans else []


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
        return files("freight.data").joinpath("templates", f"{name}.jinja").read_text(encoding="utf-8")
    if "{%" in name or "{{" in name:
        return name
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            f"data.chat_template: {name!r} is neither a file nor a template; shipped ones: {', '.join(SHIPPED)}"
        )
    return path.read_text(encoding="utf-8")
