"""YAML in, YAML out.

Reading is stricter than PyYAML in two ways that bite: a key that stands twice is a fault (PyYAML keeps the last one
silently), and `2e-5` and `1e6` are numbers (YAML 1.1 reads them as text). Dates stay text. What no config needs and a
slip or a joke may hold is refused: values of YAML's own types (sets, bytes), anchors that hold themselves, aliases of
aliases that a few lines blow up to billions of values. Writing gives what the user wrote, with every default beside it
as a comment, so that a saved config is complete to a reader and reloads equal.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from freight.config.base import Section
from freight.config.keys import fields_of, spelled
from freight.config.schema import ModelSource
from freight.errors import ConfigError

DEEPEST = 40
MOST_VALUES = 100_000


def read_mapping(path: Path) -> dict[str, Any]:
    """Parse a config file.

    Raises:
        ConfigError: It is missing, unreadable, no YAML, no mapping, or has a key twice (all such keys are named).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Give the path of a YAML config.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}). Give the path of a YAML config.") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({(error.strerror or '').lower()}). Give the path of a YAML config."
        ) from None
    try:
        value, duplicates = _parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_place(error)}: broken YAML: {_problem(error)}.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: broken YAML: {error}.") from None
    if duplicates:
        raise ConfigError(*(f"{path}:{line}: key `{key}` stands twice. Keep one." for key, line in duplicates))
    if value is None:
        raise ConfigError(f"{path}: empty. A config has the sections `model`, `data` and `train`.")
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: holds {_kind(value)}, not a mapping. A config has the sections `model`, `data` and `train`."
        )
    return value


def read_value(text: str) -> Any:
    """Parse the right side of a `key=value` override; an empty one is null.

    Raises:
        yaml.YAMLError: It is no YAML.
        ValueError: It is YAML that no config may hold.
    """
    value, duplicates = _parse(text)
    if duplicates:
        raise yaml.YAMLError(f"key {duplicates[0][0]} stands twice")
    return value


def to_yaml(config: Section) -> str:
    """What the user wrote as YAML, every default as a comment; loading it again gives an equal config."""
    return "\n".join(_lines(config, 0)) + "\n"


class _Loader(yaml.SafeLoader):
    """SafeLoader with exact numbers, no dates, and a record of keys that stand twice."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[tuple[str, int]] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    self.duplicates.append((key.value, key.start_mark.line + 1))
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """`1e6` is the integer 1000000, so that a count may be written so; `1.0e6` is a float."""
        text = str(self.construct_scalar(node)).replace("_", "")
        value = float(text)
        return int(value) if "." not in text and value.is_integer() and abs(value) < 2**63 else value


_FLOAT = "tag:yaml.org,2002:float"
_DATE = "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "!number", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
_Loader.add_constructor("!number", _Loader.construct_number)
_Loader.add_constructor(_DATE, yaml.SafeLoader.construct_yaml_str)


def _parse(text: str) -> tuple[Any, list[tuple[str, int]]]:
    """The document, and the keys that stand twice with their lines.

    Raises:
        yaml.YAMLError: It is no YAML.
        ValueError: It is YAML that no config may hold.
    """
    loader = _Loader(text)
    try:
        value = loader.get_single_data()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (KeyError, AttributeError, TypeError, IndexError):
        raise ValueError("a tag such as `!!bool` before a value that is none") from None
    finally:
        loader.dispose()
    _count(value, 0, 0)
    return value, loader.duplicates


def _count(value: Any, depth: int, before: int) -> int:
    """Values in a tree, shared ones each time they stand there, added to those before; a tree out of bounds is refused.

    Raises:
        ValueError: Says which bound.
    """
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} levels deep, or an anchor that holds itself")
    count = before + 1
    if count > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values, aliases counted each time they are used")
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            count = _count(item, depth + 1, count)
    elif value is not None and not isinstance(value, (str, bool, int, float)):
        raise ValueError(f"a value of YAML's type {type(value).__name__}, where text, a number or a list is meant")
    return count


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}:{mark.column + 1}" if mark else ""


def _problem(error: yaml.YAMLError) -> str:
    text = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return " ".join(str(text).split())


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "one value"


def _lines(section: Section, depth: int, defaults: bool = True) -> Iterator[str]:
    # Keys of `model` that nobody wrote come from `hf` or `preset`: a default beside them would be a lie.
    defaults = defaults and not isinstance(section, ModelSource)
    indent = "  " * depth
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), spelled(name, field)
        written = name in section.model_fields_set
        if isinstance(value, Section):
            inner = list(_lines(value, depth + 1, defaults))
            if any(not line.lstrip().startswith("#") for line in inner):
                yield f"{indent}{key}:"
            elif written:
                yield f"{indent}{key}: {{}}"
            elif defaults:
                yield f"{indent}# {key}:"
                inner = [f"{indent}#   {line.strip().removeprefix('# ')}" for line in inner]
            yield from inner
        elif written:
            yield from _entry(indent, key, value)
        elif defaults:
            yield from (f"{indent}# {line}" for line in _entry("", key, value))


def _entry(indent: str, key: str, value: Any) -> list[str]:
    text = yaml.safe_dump({key: _plain(value)}, sort_keys=False, allow_unicode=True, width=100)
    return [indent + line for line in text.rstrip("\n").split("\n")]


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        known = fields_of(type(value))
        names = {spelled(name, field): name for name, field in type(value).model_fields.items()}
        return {key: _plain(getattr(value, names[key])) for key in known if names[key] in value.model_fields_set}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
