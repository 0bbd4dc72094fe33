"""config.json <-> `Architecture`, through the tables of `families.py`.

Whether a family can express an architecture is not a second list of rules: the config is written, read back and
compared, and the fields that differ are what does not fit.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from freight.checkpoint.families import FAMILIES, Family, Key
from freight.checkpoint.rope_keys import read_rope, relevant, write_rope
from freight.config.architecture import Architecture
from freight.config.model_checks import architecture_faults
from freight.errors import CheckpointError


def architecture_from(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json describes.

    Raises:
        CheckpointError: Unknown `model_type`; missing or wrong keys; features that the decoder does not have.
    """
    family = _family(config)
    if config.get("quantization_config"):
        raise CheckpointError(
            "config.json has `quantization_config`: packed weights cannot be trained. Use the unquantised model."
        )
    for key, allowed in family.refused.items():
        if config.get(key) not in allowed:
            raise CheckpointError(f"config.json: {family.name} with `{key}: {config[key]}` is not supported.")
    fields: dict[str, Any] = {"family": family.name, **family.fixed}
    for name, key in family.keys.items():
        fields[name] = value = _value(config, key)
        if isinstance(key.default, bool) and not isinstance(value, bool):
            raise CheckpointError(f"config.json: `{key.name}` must be true or false; got {value!r}.")
    fields["activation"] = _activation(config, family)
    fields.update(_read_windows(config, family, fields["num_layers"]))
    if family.rotary:
        fields["rope"], fields["rope_sliding"] = read_rope(config, family)
    fields.update(_read_special(config, family, fields))
    try:
        arch = Architecture(**fields)
    except ValidationError as error:
        raise CheckpointError(f"config.json: {_first_fault(error, family)}") from None
    if faults := architecture_faults(arch):
        raise CheckpointError(f"config.json: {' '.join(faults)}")
    return arch


def config_for(arch: Architecture) -> dict[str, Any]:
    """The config.json of an architecture, in its own family or, where that is null, in the first that fits.

    Raises:
        CheckpointError: No family fits; names what does not.
    """
    candidates = [FAMILIES[arch.family]] if arch.family else list(FAMILIES.values())
    closest: tuple[Family, list[str]] | None = None
    for family in candidates:
        config = _write(arch, family)
        misfits = _differences(arch, family, config)
        if not misfits:
            return config
        if closest is None or len(misfits) < len(closest[1]):
            closest = (family, misfits)
    assert closest is not None
    family, misfits = closest
    raise CheckpointError(
        f"no Hugging Face family can hold this model; {family.name} comes closest but cannot express "
        f"{', '.join(misfits)}."
        if arch.family is None
        else f"the family {family.name} cannot express {', '.join(misfits)}. Set `model.family` to null to try others."
    )


def _family(config: Mapping[str, Any]) -> Family:
    name = config.get("model_type")
    if name in FAMILIES:
        return FAMILIES[name]
    known = ", ".join(FAMILIES)
    if name is None:
        raise CheckpointError(f"config.json has no `model_type`. Known: {known}.")
    near = difflib.get_close_matches(str(name), FAMILIES, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise CheckpointError(f"config.json: model type {name!r} is not supported. Known: {known}.{hint}")


def _value(config: Mapping[str, Any], key: Key) -> Any:
    if key.required and config.get(key.name) is None:
        raise CheckpointError(f"config.json has no `{key.name}`, which decides the shape of the weights.")
    return config.get(key.name, key.default)


def _activation(config: Mapping[str, Any], family: Family) -> str:
    name = _value(config, family.activation_key)
    for ours, spellings in family.activations.items():
        if name in spellings:
            return ours
    known = ", ".join(spelling for spellings in family.activations.values() for spelling in spellings)
    raise CheckpointError(f"config.json: `{family.activation_key.name}` {name!r} is not supported. Known: {known}.")


def _read_windows(config: Mapping[str, Any], family: Family, num_layers: Any) -> dict[str, Any]:
    """`sliding_window` (0 or switched off = null) and `layer_types`."""
    if family.windows == "none" or not isinstance(num_layers, int):
        return {}
    window = config.get("sliding_window", family.default_window) or None
    if family.windows == "switched" and not config.get("use_sliding_window", False):
        window = None
    if window is None or family.windows == "uniform":
        return {"sliding_window": window}
    types = config.get("layer_types")
    if types is None and family.windows == "switched":
        first = config.get("max_window_layers", 28)
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    elif types is None:
        types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    if len(types) != num_layers:
        raise CheckpointError(f"config.json: `layer_types` has {len(types)} entries for {num_layers} layers.")
    if "sliding_attention" not in types:
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": tuple(types)}


def _write_windows(arch: Architecture, family: Family) -> dict[str, Any]:
    windows = [arch.window_of(layer) for layer in range(arch.num_layers)]
    types = ["sliding_attention" if window else "full_attention" for window in windows]
    window = arch.sliding_window if any(windows) else None
    if family.windows == "none":
        return {}
    if family.windows == "uniform":
        return {"sliding_window": window}
    written: dict[str, Any] = {"sliding_window": window, "layer_types": types}
    if family.windows == "switched":
        full_first = types.index("sliding_attention") if window else arch.num_layers
        written.update(use_sliding_window=window is not None, max_window_layers=full_first)
    return written


def _read_special(config: Mapping[str, Any], family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The few values that a family computes."""
    try:
        if family.name == "gemma2":
            return {
                "embedding_scale": float(fields["hidden_size"]) ** 0.5,
                "attention_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
            }
        if family.name == "gpt2":
            scaled = config.get("scale_attn_weights", True)
            ffn = fields["ffn_hidden_size"]
            return {
                "ffn_hidden_size": 4 * fields["hidden_size"] if ffn is None else ffn,
                "attention_scale": None if scaled else 1.0,
            }
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise CheckpointError("config.json: sizes and scales must be positive numbers.") from None
    return {}


def _write_special(arch: Architecture, family: Family) -> dict[str, Any]:
    if family.name == "gemma2":
        scalar = arch.scale**-2
        return {"query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar)) else scalar}
    if family.name == "gpt2":
        return {"scale_attn_weights": not math.isclose(arch.scale, 1.0)}
    return {}


def _write(arch: Architecture, family: Family) -> dict[str, Any]:
    config: dict[str, Any] = {"architectures": [family.class_name], "model_type": family.name}
    explicit = {"num_query_groups": arch.groups, "head_dim": arch.dims_per_head}
    for name, key in family.keys.items():
        value = explicit.get(name, getattr(arch, name))
        config[key.name] = bool(value) if isinstance(key.default, bool) else value
    spellings = family.activations.get(arch.activation) or next(iter(family.activations.values()))
    config[family.activation_key.name] = spellings[0]
    config.update(_write_windows(arch, family))
    if family.rotary:
        config.update(write_rope(arch.rope, arch.max_position_embeddings, family))
    return {**config, **_write_special(arch, family), **family.written, "use_cache": True}


def _differences(arch: Architecture, family: Family, config: Mapping[str, Any]) -> list[str]:
    try:
        back = architecture_from(config)
    except CheckpointError as error:
        return [str(error).removeprefix("config.json: ").rstrip(".")]
    mine, theirs = _meaning(arch), _meaning(back)
    return [f"`{key}: {mine[key]}`" for key in mine if not _equal(mine[key], theirs[key])]


def _meaning(arch: Architecture) -> dict[str, Any]:
    """An architecture as what it computes: defaults spelled out, keys without effect left out."""
    values = arch.model_dump(exclude={"family", "rope", "rope_sliding", "sliding_window", "layer_types"})
    values.update(
        num_query_groups=arch.groups,
        head_dim=arch.dims_per_head,
        attention_scale=arch.scale,
        sliding_window=tuple(arch.window_of(layer) for layer in range(arch.num_layers)),
    )
    if arch.position_embedding == "rope":
        ropes = [arch.rope_of(layer) for layer in range(arch.num_layers)]
        tables = [(r.theta, r.percent, relevant(r.scaling, arch.max_position_embeddings)) for r in ropes]
        values["rope"] = tables[0] if all(table == tables[0] for table in tables) else tables
    else:
        values["rope"] = None
    return values


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b


def _first_fault(error: ValidationError, family: Family) -> str:
    fault = error.errors()[0]
    field = str(fault["loc"][0]) if fault["loc"] else ""
    name = family.keys[field].name if field in family.keys else field
    return f"`{name}`: {fault['msg']}; got {fault['input']!r}."
