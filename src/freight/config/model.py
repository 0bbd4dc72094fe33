"""From what a user wrote under `model` to a complete architecture."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from freight.config.architecture import Architecture
from freight.config.base import Section
from freight.config.messages import translate
from freight.config.presets import preset
from freight.config.schema import ModelSection, ModelSource
from freight.errors import ConfigError


def architecture_of(section: ModelSection, base: Architecture | None = None) -> Architecture:  # pyright: ignore
    """The architecture a `model` section means: its own keys over those of `base` or of its preset.

    A mapping (`rope`, `rope.scaling`) is merged key by key; a scaling of another type replaces the old one whole.

    Args:
        section: `config.model`.
        base: What `model.hf` holds (`checkpoint.read_architecture`); None when there is no `model.hf`.

    Raises:
        ConfigError: A key is missing or out of bounds, or the preset does not exist; all faults together.
    """
    if base is None and section.preset is not None:
        base = preset(section.preset)
    values = _written(base) if base is not None else {}
    _merge(values, {key: v for key, v in _written(section).items() if key not in ModelSource.model_fields})
    try:
        return Architecture.model_validate(values)
    except ValidationError as error:
        raise ConfigError(*(text for _, text in translate(error, values, Architecture, "model"))) from None


def _written(section: Section) -> dict[str, Any]:
    return section.model_dump(exclude_unset=True)


def _merge(values: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        old = values.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and value.get("type", old.get("type")) == old.get("type"):
            _merge(old, value)
        else:
            values[key] = value
