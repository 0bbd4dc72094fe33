"""Runs chat templates: programs from strangers that may be wrong, endless or hostile, and must not hang or fill memory.

Jinja's immutable sandbox keeps a template from touching anything outside. What it does not bound is work: here every
turn of a loop, macro or call block is a step, and steps and sizes are bounded in proportion to the chat that is
rendered, so that the verdict does not depend on the machine. A single built-in call that makes too much from one huge
number is refused by that number. Besides, a template is compiled once here, and its data is not copied per render.

What templates expect beside Jinja is what transformers offers them: `raise_exception`, `strftime_now`, `tojson` that
leaves characters as they are, loop controls, and `{% generation %}` around what the assistant says.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# Steps and characters that any chat may take, and how many more for each character of it.
FREE = 50_000
PER_CHARACTER = 16
MOST_BITS = 10_000
# Methods of texts and filters that make much of one number, of two texts, or of a number inside a text.
WIDTHS = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice"])
PRODUCTS = frozenset(["replace", "join"])
FORMATS = frozenset(["format", "format_map"])
# Blocks whose text is kept, and may be changed, before it is written.
CAPTURES = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
WIDE = re.compile(r"\d{6}")


class TemplateLimit(Exception):
    """A template that does far more than writing down the chat it is given."""


class Sandbox(ImmutableSandboxedEnvironment):
    """One template's environment, with the bounds of the render that is going on."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, *, marked: bool) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[MarkedGeneration if marked else Generation, "jinja2.ext.loopcontrols"],
        )
        self.most = FREE
        self.steps = 0
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}
        self.filters.update(tojson=_to_json, bounded=self.bounded, joined=self.joined)
        del self.filters["random"], self.globals["lipsum"]  # a chat renders to one text
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_make_dict, namespace=_Namespace
        )

    def begin(self, characters: int) -> None:
        """Set the bounds for rendering a chat of some characters."""
        self.most = FREE + PER_CHARACTER * characters
        self.steps = 0

    @property
    def step(self) -> None:
        """Reading it counts a turn of a loop or a call of a macro: a call would cost a sandbox's checks each time.

        Raises:
            TemplateLimit: There were too many.
        """
        self.steps += 1
        if self.steps > self.most:
            raise TemplateLimit(f"more than {self.most:,} steps; it may be endless")

    def bounded(self, value: Any) -> Any:
        """The value, unless it is far longer than the chat."""
        if isinstance(value, (str, list, tuple)) and len(value) > self.most:
            self._refuse_size(len(value))
        return value

    def joined(self, parts: Sequence[Any]) -> str:
        """Texts joined, as `~` does."""
        return self.bounded("".join(map(str, parts)))

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something from a template; methods of texts are bounded."""
        owner = getattr(getattr(target, "__wrapped__", target), "__self__", None)  # Jinja wraps `str.format`
        if not isinstance(owner, str):
            return super().call(context, target, *args, **kwargs)
        self._refuse_huge(target.__name__, (owner, *args, *kwargs.values()))
        return self.bounded(super().call(context, target, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic that can make much of little."""
        if operator != "+":
            self._refuse_growth(operator, left, right)
        return self.bounded(self.binop_table[operator](left, right))

    def _refuse_growth(self, operator: str, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
            if bits > MOST_BITS:
                raise TemplateLimit(f"a number of more than {MOST_BITS:,} bits")
        elif operator == "%":
            self._refuse_huge("format", (left,))
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    self._refuse_size(len(sequence) * times)

    def _refuse_huge(self, name: str, given: Sequence[Any]) -> None:
        """Refuse a call, by its name and what it is given, that would make far more than the chat."""
        if name in WIDTHS:
            self._refuse_size(max((value for value in given if isinstance(value, int)), default=0))
        elif name in FORMATS:
            if any(isinstance(value, str) and WIDE.search(value) for value in given[:1]):
                raise TemplateLimit("a format of a million characters or more")
        elif name in PRODUCTS:
            sizes = sorted(len(value) for value in given if isinstance(value, (str, list, tuple)))
            self._refuse_size((sizes[-1] if sizes else 0) * (sizes[-2] if len(sizes) > 1 else 1))

    def _refuse_size(self, size: int) -> None:
        if size > self.most:
            raise TemplateLimit(f"a value of more than {self.most:,} characters or items")

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._refuse_huge(name, (*args, *kwargs.values()))
            return self.bounded(function(*args, **kwargs))

        return guarded

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Bounds().visit(source), *args, **kwargs)


class Generation(Extension):
    """`{% generation %}` around what the assistant says: written as what is in it."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body, in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(self.body(parser)).set_lineno(line)

    def body(self, parser: Parser) -> list[nodes.Node]:
        """What stands in the block."""
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Digits, which no filter changes; drawn anew in every process, so that no data can hold them.
START, STOP = (f"\ufdd0{secrets.randbits(64)}\ufdd1" for _ in range(2))


class MarkedGeneration(Generation):
    """The same, with a mark at either end."""

    def body(self, parser: Parser) -> list[nodes.Node]:
        """What stands in the block, between marks."""
        first, last = (nodes.Output([nodes.TemplateData(mark)]) for mark in (START, STOP))
        return [first, *super().body(parser), last]


class _Bounds(NodeTransformer):
    """Writes the counting of steps and the bounds of sizes into a template."""

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("step")).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _counted

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "bounded", [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "joined", [], [], None, None).set_lineno(node.lineno)


class _Namespace(Namespace):
    """A namespace that takes no names of Python's own machinery."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _check_name(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace takes no attribute {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(indent, int) and indent > FREE:
        raise TemplateLimit(f"an indent of more than {FREE:,} characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def characters(value: Any) -> int:
    """Size of a chat or a part of it: characters of its texts, and something for each of its values."""
    if isinstance(value, str):
        return len(value) + 1
    if isinstance(value, Mapping):
        return 1 + sum(len(key) + characters(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return 1 + sum(map(characters, value))
    return 1


def written(template: Template, variables: Mapping[str, Any]) -> str:
    """What a template of a sandbox writes, within the bounds set by `begin`."""
    environment = template.environment
    assert isinstance(environment, Sandbox)
    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables):
        size += len(piece)
        if size > environment.most:
            raise TemplateLimit(f"a text of more than {environment.most:,} characters")
        pieces.append(piece)
    return "".join(pieces)
