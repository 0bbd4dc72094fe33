"""A configuration while it is made small: a mapping, the keys that stay, and what has been changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from freight.config.keys import shown


class Change(NamedTuple):
    """A key of the configuration that has another value in the small run.

    Args:
        key: Dotted.
        before: As the user's run has it.
        after: As the small run has it.
        why: Other than size; empty if it is only that.
    """

    key: str
    before: Any
    after: Any
    why: str = ""

    def __str__(self) -> str:
        return f"{self.key} {shown(self.before)} -> {shown(self.after)}" + (f" ({self.why})" if self.why else "")


@dataclass
class Small:
    """The small configuration while it is made, as a mapping.

    Args:
        raw: Keys as a file would have them.
        keep: Keys that stay as they are.
        changes: What has been changed so far.
        could_keep: Keys that were, or would have been, made small.
    """

    raw: dict[str, Any]
    keep: frozenset[str]
    changes: list[Change] = field(default_factory=list)
    could_keep: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a dotted key; the default where it is not written or null."""
        node: Any = self.raw
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return default if node is None else node

    def put(self, key: str, value: Any, *, before: Any = None, why: str = "") -> Any:
        """Make a key small unless it is kept; returns what it has now."""
        old = self.get(key, before)
        self.could_keep.add(key)
        return self.fix(key, old if key in self.keep and old is not None else value, before=before, why=why)

    def fix(self, key: str, value: Any, *, before: Any = None, why: str = "") -> Any:
        """Change a key that cannot be kept; returns what it has now. None takes the key away."""
        old = self.get(key, before)
        *parents, last = key.split(".")
        node = self.raw
        for part in parents:
            node = node.setdefault(part, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
        if value != old:
            self.changes.append(Change(key, old, value, why))
        return value
