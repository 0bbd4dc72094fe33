"""Options of a benchmark: defaults, and nothing that does not exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freight.config.messages import did_you_mean
from freight.errors import ConfigError


def chosen_options(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults under what was given.

    Raises:
        ConfigError: An option that does not exist, or a value of another type than its default.
    """
    for name, value in options.items():
        if name not in defaults:
            raise ConfigError(
                f'option "{name}" does not exist.{did_you_mean(name, list(defaults))} Known: {", ".join(defaults)}.'
            )
        default = defaults[name]
        if default is not None and not _fits(value, default):
            kind = type(default).__name__
            raise ConfigError(f"option `{name}` must be of type {kind} (default {default!r}); got {value!r}.")
    return {**defaults, **options}


def _fits(value: Any, default: Any) -> bool:
    """Whether a value has the type of its default; a whole number may stand for a float."""
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(default)
