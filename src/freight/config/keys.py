"""Walks the schema: which keys exist, and in plain words what each may hold.

Error sentences and the configuration reference both speak from here, so they cannot disagree.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from freight.config.base import Section

Path = tuple[str | int, ...]


def dotted(path: Sequence[str | int]) -> str:
    """`("data", "train", 0, "path")` -> `data.train[0].path`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def spelled(name: str, field: FieldInfo) -> str:
    """The field's name as it stands in a file (`async`, not `asynchronous`)."""
    return field.alias or name


def fields_of(section: type[Section]) -> dict[str, FieldInfo]:
    """Fields by the name they have in a file."""
    return {spelled(name, field): field for name, field in section.model_fields.items()}


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Members of a union, unions inside it unfolded, `Annotated` kept."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(leaf for member in get_args(annotation) for leaf in alternatives(member))
    if get_origin(annotation) is Annotated and _is_union(get_args(annotation)[0]):
        inner, *bounds = get_args(annotation)
        return tuple(leaf if leaf is type(None) else Annotated[leaf, *bounds] for leaf in alternatives(inner))
    return (annotation,)


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a field of this type holds, if any."""
    for member in alternatives(annotation):
        if isinstance(member, type) and issubclass(member, Section):
            return member
    return None


def item_of(annotation: Any) -> Any:
    """Type of the items of the list among a field's alternatives; None if there is no list."""
    for member in alternatives(annotation):
        if get_origin(member) is tuple:
            return get_args(member)[0]
    return None


def value_of(annotation: Any) -> Any:
    """Type of the values of the mapping with free keys among a field's alternatives; None if there is none."""
    for member in alternatives(annotation):
        if get_origin(member) is dict:
            return get_args(member)[1]
    return None


def annotation_at(root: type[Section], path: Path) -> Any:
    """Type (bounds included) of what stands at a path; None where the schema knows nothing."""
    annotation: Any = root
    for part in path:
        if isinstance(part, int):
            annotation = item_of(annotation)
        else:
            section = section_in(annotation)
            field = fields_of(section).get(part) if section else None
            annotation = with_bounds(field) if field is not None else None if section else value_of(annotation)
        if annotation is None:
            return None
    return annotation


def with_bounds(field: FieldInfo) -> Any:
    """A field's type with its bounds as one annotation."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def holds_any_keys(annotation: Any) -> bool:
    """Whether the user names the keys below it (`data.fields`, `log.wandb`)."""
    return any(member is dict or get_origin(member) is dict for member in alternatives(annotation))


def known(root: type[Section], path: Path) -> bool:
    """Whether a path names a key of the schema, or lies inside a mapping whose keys are free."""
    for stop in range(1, len(path) + 1):
        annotation = annotation_at(root, path[:stop])
        if annotation is None:
            return False
        if holds_any_keys(annotation):
            return True
    return True


def every_key(root: type[Section], prefix: Path = ()) -> Iterator[Path]:
    """Paths of all keys that hold a value, depth first, in the order of the classes."""
    for name, field in fields_of(root).items():
        path = (*prefix, name)
        section = section_in(field.annotation)
        if section is None or item_of(field.annotation) is not None:
            yield path
        else:
            yield from every_key(section, path)


def choices(annotation: Any) -> tuple[Any, ...]:
    """Values of the literals among a field's alternatives."""
    return tuple(v for member in alternatives(annotation) if get_origin(member) is Literal for v in get_args(member))


def allowed(annotation: Any) -> str:
    """What a type accepts, in words: `an integer of at least 1, or null`."""
    members = alternatives(annotation)
    if type(None) in members and all(m is type(None) or get_origin(m) is Literal for m in members):
        return either([*choices(annotation), "null"])
    words = [_words(member) for member in members if member is not type(None)]
    sentence = " or ".join(dict.fromkeys(words))
    return f"{sentence}, or null" if type(None) in members else sentence


def shown(value: Any) -> str:
    """A value as a message shows it: JSON, shortened; containers only by kind."""
    if isinstance(value, dict):
        return "a mapping" if value else "{}"
    if isinstance(value, (list, tuple)):
        return json.dumps(value) if all(isinstance(v, (int, float)) for v in value) else f"a list of {len(value)}"
    text = value if isinstance(value, str) else None
    if text is not None and len(text) > 60:
        return json.dumps(text[:57] + "...", ensure_ascii=False)
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return str(value)


def either(options: Sequence[Any]) -> str:
    """`` `a`, `b` or `c` ``."""
    quoted = [f"`{option}`" for option in options]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _words(annotation: Any) -> str:
    bounds: Sequence[Any] = ()
    if get_origin(annotation) is Annotated:
        annotation, *bounds = get_args(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return either(arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list ({_words_of_items(arguments[0])})"
        return f"a list of {len(arguments)} ({_words_of_items(arguments[0])})"
    if annotation is dict or origin is dict or (isinstance(annotation, type) and issubclass(annotation, Section)):
        return "a mapping"
    plain = {bool: "true or false", int: "an integer", float: "a number", str: "text"}.get(annotation, "any value")
    return plain + _bounds(bounds)


def _words_of_items(annotation: Any) -> str:
    return " or ".join(_words(member) for member in alternatives(annotation))


def _bounds(bounds: Sequence[Any]) -> str:
    lower = [f" of at least {b.ge:g}" if isinstance(b, Ge) else f" above {b.gt:g}" for b in bounds if _lower(b)]
    upper = [f"at most {b.le:g}" if isinstance(b, Le) else f"below {b.lt:g}" for b in bounds if _upper(b)]
    if lower and upper:
        return f"{lower[0]} and {upper[0]}"
    return lower[0] if lower else f" {upper[0]}" if upper else ""


def _lower(bound: Any) -> bool:
    return isinstance(bound, (Ge, Gt))


def _upper(bound: Any) -> bool:
    return isinstance(bound, (Le, Lt))
