"""Shipped architectures, by name; the numbers and their sources stand in `presets.yaml`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from freight.config.architecture import Architecture
from freight.config.messages import did_you_mean
from freight.errors import ConfigError


def preset_names() -> tuple[str, ...]:
    """Names of all presets, in the order of the file."""
    return tuple(_all())


def preset(name: str) -> Architecture:
    """The architecture of a preset.

    Raises:
        ConfigError: There is no such preset.
    """
    presets = _all()
    if name not in presets:
        raise ConfigError(
            f'`model.preset` "{name}" does not exist.{did_you_mean(name, list(presets))} Presets: {", ".join(presets)}.'
        )
    values = dict(presets[name])
    if "layer_types" in values:  # The file gives a pattern that repeats.
        pattern = values["layer_types"]
        values["layer_types"] = [pattern[i % len(pattern)] for i in range(values["num_layers"])]
    return Architecture.model_validate(values)


@cache
def _all() -> dict[str, dict[str, Any]]:
    text = files("freight.config").joinpath("presets.yaml").read_text(encoding="utf-8")
    return {name: values for name, values in yaml.safe_load(text).items() if not name.startswith("_")}
