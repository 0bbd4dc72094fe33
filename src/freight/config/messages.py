"""Sentences about single keys: what pydantic found, said in the house form with the nearest right name.

pydantic's own texts are never shown: a sentence is made from the key's path, the schema's types and the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from freight.config.base import Section
from freight.config.keys import (
    Path,
    allowed,
    annotation_at,
    choices,
    dotted,
    every_key,
    fields_of,
    section_in,
    shown,
)


def translate(error: ValidationError, raw: Any, root: type[Section], prefix: str = "") -> list[tuple[Path, str]]:
    """One `(path, sentence)` per key at fault.

    Args:
        error: What validation gave.
        raw: What was validated.
        root: Against which section.
        prefix: Dotted key at which `raw` stands in the whole configuration.
    """
    found: dict[Path, str] = {}
    for detail in error.errors(include_url=False, include_context=False):
        found.setdefault(_walk(raw, detail["loc"]), detail["type"])
    deepest = [path for path in found if not any(other != path and other[: len(path)] == path for other in found)]
    return [(path, _sentence(path, found[path], raw, root, prefix)) for path in deepest]


def did_you_mean(name: str, options: Sequence[str]) -> str:
    """`` Did you mean `x`?`` with a leading space, or nothing."""
    folded = {option.lower(): option for option in options}
    near = get_close_matches(name.lower(), list(folded), n=1, cutoff=0.6)
    return f" Did you mean `{folded[near[0]]}`?" if near else ""


def unknown_key(path: Path, value: Any, root: type[Section], prefix: str = "") -> str:
    """Sentence about a key that does not exist: the nearest one here, or the same name elsewhere."""
    section = section_in(annotation_at(root, path[:-1])) or root
    here = list(fields_of(section))
    name = str(path[-1])
    parent = ".".join(filter(None, (prefix, dotted(path[:-1]))))
    elsewhere = [".".join(filter(None, (prefix, dotted(key)))) for key in every_key(root)]
    same_name = [key for key in elsewhere if key.rsplit(".", 1)[-1] == name]
    if same_name:
        hint = f" Did you mean `{same_name[0]}`?"
    elif hint := did_you_mean(name, here):
        hint = hint.replace("`", f"`{parent}.", 1) if parent else hint
    else:
        near = get_close_matches(name, [key.rsplit(".", 1)[-1] for key in elsewhere], n=1, cutoff=0.75)
        hint = f" Did you mean `{next(k for k in elsewhere if k.endswith(near[0]))}`?" if near else ""
    keys = f"Keys of `{parent}`" if parent else "Sections"
    key = ".".join(filter(None, (parent, name)))
    return f"`{key}` is not a key of Freight; got {shown(value)}.{hint} {keys}: {', '.join(here)}."


def _walk(raw: Any, location: Sequence[int | str]) -> Path:
    """The part of pydantic's location that names keys and list places; names of union members are left out."""
    path: list[str | int] = []
    node = raw
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if isinstance(part, int) and isinstance(node, (list, tuple)) and part < len(node):
            path.append(part)
            node = node[part]
        elif isinstance(part, str) and isinstance(node, Mapping) and (part in node or last):
            if part not in node and _names_a_type(part):
                continue
            path.append(part)
            node = node.get(part)
    return tuple(path)


def _names_a_type(part: str) -> bool:
    return part in ("str", "int", "float", "bool", "dict") or "[" in part or part[:1].isupper()


def _sentence(path: Path, kind: str, raw: Any, root: type[Section], prefix: str) -> str:
    key = ".".join(filter(None, (prefix, dotted(path))))
    annotation = annotation_at(root, path)
    missing, value = _value_at(raw, path)
    if missing:
        return f"`{key}` is missing. Set it to {allowed(annotation)}."
    if kind == "extra_forbidden" or (annotation is None and isinstance(path[-1], str)):
        return unknown_key(path, value, root, prefix)
    options = [option for option in choices(annotation) if isinstance(option, str)]
    hint = did_you_mean(value, options) if isinstance(value, str) else ""
    return f"`{key}` must be {allowed(annotation)}; got {shown(value)}.{hint}{_switch_off(annotation, value)}"


def _switch_off(annotation: Any, value: Any) -> str:
    nullable = allowed(annotation).endswith("or null")
    return " Use null to leave it off." if nullable and value in (0, -1) and not isinstance(value, bool) else ""


def _value_at(raw: Any, path: Path) -> tuple[bool, Any]:
    node = raw
    for part in path:
        if isinstance(node, Mapping) and part not in node:
            return True, None
        node = node[part]
    return False, node
