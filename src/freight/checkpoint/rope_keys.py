"""Rotary embeddings in config.json: two generations of spelling, read strictly and written so that both are served.

transformers 5 keeps everything in `rope_parameters` (one table, or one per layer type); transformers 4 has `rope_theta`
and `rope_scaling`. Where a file says the same thing twice, both must agree: the library would silently take one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from freight.checkpoint.families import Family
from freight.config.architecture import RopeConfig, RopeScaling
from freight.errors import CheckpointError

DEFAULT_THETA = 10000.0
LAYER_TYPES = ("full_attention", "sliding_attention")

# What each kind of scaling reads, and which of it must be given.
SCALING_KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor"),
    "proportional": ("factor",),
}
REQUIRED_KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
STRETCHED = ("llama3", "yarn", "longrope")  # the kinds that know the length before stretching
IGNORED_KEYS = {"finetuned"}  # a note of early YaRN releases


def read_rope(config: Mapping[str, Any], family: Family) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary configuration of all layers, and of sliding layers where the file gives them their own.

    Raises:
        CheckpointError: Unknown kinds or keys, missing keys, or two spellings that disagree.
    """
    parameters = _table(config, "rope_parameters")
    old = _old_spelling(config, family)
    if parameters is None:
        return _rope(old, config, family), None
    nested = [key for key in parameters if key in LAYER_TYPES]
    if not nested:
        _agree(parameters, old, config, family)
        return _rope({**_plain(old), **parameters}, config, family), None
    if len(nested) < len(parameters):
        stray = sorted(set(parameters) - set(nested))
        raise CheckpointError(f"config.json: `rope_parameters` mixes layer types and keys: {', '.join(stray)}.")
    tables = {key: _table(parameters, key) or {} for key in nested}
    ropes = {key: _rope({**_plain(old), **table}, config, family) for key, table in tables.items()}
    full = ropes.get("full_attention") or ropes["sliding_attention"]
    sliding = ropes.get("sliding_attention")
    return full, sliding if sliding != full else None


def write_rope(rope: RopeConfig, max_position_embeddings: int, family: Family) -> dict[str, Any]:
    """Keys for transformers 5 and 4 at once."""
    assert family.rotary is not None
    theta_key, percent_key, default_percent = family.rotary
    scaling = relevant(rope.scaling, max_position_embeddings)
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if scaling:
        kind = scaling.pop("type")
        table = {"rope_type": kind, "rope_theta": rope.theta, **scaling}
        scaling = {"rope_type": kind, "type": kind, **scaling}
    written: dict[str, Any] = {"rope_parameters": table, "rope_theta": rope.theta, "rope_scaling": scaling}
    written[theta_key] = rope.theta
    if rope.percent != default_percent or percent_key != "partial_rotary_factor":
        written[percent_key] = rope.percent
        table["partial_rotary_factor"] = rope.percent
    return written


def relevant(scaling: RopeScaling | None, max_position_embeddings: int) -> dict[str, Any] | None:
    """The keys that mean something for this kind of scaling, without those left at null."""
    if scaling is None:
        return None
    values = {key: getattr(scaling, key) for key in SCALING_KEYS[scaling.type]}
    if scaling.type in STRETCHED:
        values["original_max_position_embeddings"] = scaling.original_max_position_embeddings or max_position_embeddings
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"type": scaling.type, **{key: value for key, value in values.items() if value is not None}}


def _old_spelling(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and the family's own names, as one table; a conflict among them is an error."""
    assert family.rotary is not None
    theta_key, percent_key, _ = family.rotary
    table = dict(_table(config, "rope_scaling") or {})
    for name, keys in (
        ("rope_theta", ("rope_theta", theta_key)),
        ("partial_rotary_factor", ("partial_rotary_factor", percent_key)),
    ):
        for key in keys:
            if config.get(key) is None:
                continue
            value = _number(config[key], key)
            if name in table and _number(table[name], name) != value:
                raise CheckpointError(
                    f"config.json gives the same thing twice: `{name}` {table[name]} and `{key}` {config[key]}. "
                    "Keep one."
                )
            table[name] = value
    return table


def _plain(old: Mapping[str, Any]) -> dict[str, Any]:
    """Of the old spelling, what a newer table may lack."""
    return {key: old[key] for key in ("rope_theta", "partial_rotary_factor") if key in old}


def _agree(new: Mapping[str, Any], old: Mapping[str, Any], config: Mapping[str, Any], family: Family) -> None:
    for key in _plain(old):
        if new.get(key) is not None and _number(new[key], key) != old[key]:
            raise CheckpointError(
                f"config.json gives `{key}` twice: {new[key]} in `rope_parameters`, {old[key]} outside. Keep one."
            )
    if config.get("rope_scaling"):
        mine, theirs = (_rope({**_plain(old), **table}, config, family) for table in (new, old))
        if mine != theirs:
            raise CheckpointError("config.json: `rope_parameters` and `rope_scaling` disagree. Keep one.")


def _rope(table: Mapping[str, Any], config: Mapping[str, Any], family: Family) -> RopeConfig:
    assert family.rotary is not None
    default_percent = family.rotary[2]
    kind = table.get("rope_type") or table.get("type") or "default"
    percent = _number(table.get("partial_rotary_factor") or default_percent, "partial_rotary_factor")
    if percent != default_percent and family.rotary[1] == "partial_rotary_factor" and kind != "proportional":
        raise CheckpointError(f"config.json: {family.name} rotates whole heads; got `partial_rotary_factor` {percent}.")
    theta = _number(table.get("rope_theta") or DEFAULT_THETA, "rope_theta")
    scaling = None if kind == "default" else _scaling(kind, table, config)
    try:
        return RopeConfig(theta=theta, percent=percent, interleaved=False, scaling=scaling)
    except ValidationError as error:
        raise CheckpointError(f"config.json: rotary embedding: {_fault(error)}.") from None


def _scaling(kind: Any, table: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    if kind not in SCALING_KEYS:
        raise CheckpointError(
            f"config.json: unknown rope type {kind!r}. Known: default, {', '.join(sorted(SCALING_KEYS))}."
        )
    allowed = SCALING_KEYS[kind]
    values = {
        key: value
        for key, value in table.items()
        if value is not None and key not in {"rope_type", "type", "rope_theta", "partial_rotary_factor", *IGNORED_KEYS}
    }
    # Some files (Phi-3) write the length before stretching beside the table; there it wins.
    outside = config.get("original_max_position_embeddings")
    if outside is not None and kind in STRETCHED:
        values["original_max_position_embeddings"] = outside
    elif kind not in STRETCHED:
        values.pop("original_max_position_embeddings", None)
    unknown = sorted(set(values) - set(allowed))
    missing = [key for key in REQUIRED_KEYS[kind] if key not in values]
    if unknown or missing:
        fault = f"unknown {', '.join(unknown)}" if unknown else f"missing {', '.join(missing)}"
        raise CheckpointError(f"config.json: rope type {kind}: {fault}. Its keys are {', '.join(allowed)}.")
    for key in set(values) - {"truncate", "short_factor", "long_factor"}:
        values[key] = _number(values[key], key)
    if "original_max_position_embeddings" in values:
        values["original_max_position_embeddings"] = int(values["original_max_position_embeddings"])
    try:
        return RopeScaling(type=kind, **values)
    except ValidationError as error:
        raise CheckpointError(f"config.json: rope type {kind}: {_fault(error)}.") from None


def _fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    return f"`{fault['loc'][0]}`: {fault['msg']}; got {fault['input']!r}"


def _table(mapping: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    value = mapping.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"config.json: `{key}` must be a mapping or null; got {value!r}.")
    return value


def _number(value: Any, key: str) -> float:
    """A float, also where YAML habits left a text such as "1e6"."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise CheckpointError(f"config.json: `{key}` must be a number; got {value!r}.") from None
