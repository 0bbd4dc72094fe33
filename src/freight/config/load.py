"""From a YAML file and `key=value` overrides to a checked configuration.

The order matters: foreign names become ours in the file and in the overrides apart, so that an override in any spelling
replaces what the file says in any other; then they are merged, sizes per device become tokens, and everything is
validated. Every fault of every stage is kept and they are raised together. Nothing is read from the environment.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path as FilePath
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from freight.config.aliases import apply_aliases
from freight.config.base import Section
from freight.config.checks import faults, file_faults, fit_faults
from freight.config.derived_keys import batch_sizes, context_method, ffn_chunk, min_lr
from freight.config.keys import Path, fields_of, section_in, shown
from freight.config.messages import translate
from freight.config.model import architecture_of
from freight.config.model_checks import architecture_faults
from freight.config.schema import Config
from freight.config.unavailable import take_out
from freight.config.yaml_text import read_mapping, read_value
from freight.errors import ConfigError

# Stand-ins for required keys that are missing, so that the other keys can still be checked against each other.
_STAND_INS: dict[Path, Any] = {
    ("train", "optimizer", "lr"): 1.0,
    ("recompute", "granularity"): "full",
}


def load_config(
    path: str | FilePath,
    overrides: Sequence[str] = (),
    *,
    notice: Callable[[str], None] = lambda _: None,
    world_size: int | None = None,
    check_files: bool = True,
) -> Config:
    """Read, merge, translate and check a configuration.

    Args:
        path: YAML file.
        overrides: `section.key=value`, each value in YAML; later ones win.
        notice: Gets one line for every foreign name that was understood.
        world_size: Processes, needed only for sizes that are given per device; None = as many as it asks for.
        check_files: Whether the files that the configuration names must exist.

    Raises:
        ConfigError: All faults, one sentence each.
    """
    written, found = _expand(read_mapping(FilePath(path)))
    found += [*_no_text_keys(written), *apply_aliases(written, notice)]
    over, problems = _overrides(overrides)
    found += [*problems, *apply_aliases(over, notice)]
    raw, problems = _merged(written, over)
    found += problems
    found += batch_sizes(raw, _data_ranks(raw, world_size), notice)
    found += min_lr(raw, notice)
    found += context_method(raw, notice)
    found += ffn_chunk(raw, notice)
    found += take_out(raw)
    return _checked(raw, found, check_files)


def _data_ranks(raw: dict[str, Any], world_size: int | None) -> int:
    """Ranks with microbatches of their own, as far as a configuration that is not yet checked tells."""
    parallel = raw.get("parallel")
    context, data = (parallel.get(key) if isinstance(parallel, dict) else None for key in ("context", "data_shard"))
    if world_size is not None:
        return max(1, world_size // context) if isinstance(context, int) and context > 0 else world_size
    return data if isinstance(data, int) and data > 0 else 1


def config_from(raw: dict[str, Any], *, check_files: bool = False) -> Config:
    """Check a configuration that is already a mapping, in Freight's own names.

    Raises:
        ConfigError: All faults, one sentence each.
    """
    raw = json.loads(json.dumps(raw))
    return _checked(raw, list(take_out(raw)), check_files)


def _checked(raw: dict[str, Any], found: list[str], check_files: bool) -> Config:
    _open_sections(raw, Config)
    config, wrong = _validated(raw)
    found += wrong.values()
    usable = config or _without(raw, wrong)
    if usable is not None:
        between = [*faults(usable), *_model_faults(usable), *(file_faults(usable) if check_files else ())]
        # A sentence about a key that is already at fault would only repeat it in other words.
        quoted = [f"`{'.'.join(map(str, _field(path)))}`" for path in wrong]
        found += [sentence for sentence in between if not any(key in sentence for key in quoted)]
    if found or config is None:
        raise ConfigError(*dict.fromkeys(found))
    return config


def _validated(raw: dict[str, Any]) -> tuple[Config | None, dict[Path, str]]:
    try:
        # Strict: `steps: "10"` and `seed: true` are mistakes. JSON mode still takes lists for tuples.
        return Config.model_validate_json(json.dumps(raw), strict=True), {}
    except ValidationError as error:
        return None, dict(translate(error, raw, Config))


def _without(raw: dict[str, Any], wrong: Iterable[Path]) -> Config | None:
    """The configuration with the keys at fault left out, for checking the rest; None if that is not enough."""
    rest = json.loads(json.dumps(raw))
    for path in wrong:
        *parents, last = _field(path)
        node: Any = rest
        for part in parents:
            node = node.get(part, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node.pop(last, None)
    for path, stand_in in _STAND_INS.items():
        if path[0] not in rest and not fields_of(Config)[str(path[0])].is_required():
            continue
        node = rest
        for part in path[:-1]:
            node = node.setdefault(part, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node.setdefault(path[-1], stand_in)
    return _validated(rest)[0]


def _field(path: Path) -> Path:
    """The key that holds the list in which a path ends, or the path itself."""
    return tuple(itertools.takewhile(lambda part: isinstance(part, str), path))


def _model_faults(config: Config) -> list[str]:
    """Faults of an architecture that stands in the configuration itself; what `model.hf` holds is seen later."""
    if config.model.hf is not None or not config.model.model_fields_set:
        return []
    try:
        arch = architecture_of(config.model)
    except ConfigError as error:
        return list(error.faults)
    return [*architecture_faults(arch), *fit_faults(config, arch)]


def _open_sections(raw: dict[str, Any], section: type[Section]) -> None:
    """A section that is required, or stands empty (`train:` and nothing below), is an empty mapping."""
    for name, field in fields_of(section).items():
        inner = section_in(field.annotation)
        if inner is None or not (field.is_required() or name in raw):
            continue
        if raw.get(name) is None and type(None) not in getattr(field.annotation, "__args__", ()):
            raw[name] = {}
        if isinstance(raw.get(name), dict):
            _open_sections(raw[name], inner)


def _overrides(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    over: dict[str, Any] = {}
    problems: list[str] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            problems.append(f'override "{text}" is not `key=value`. Write for example `train.steps=10`.')
            continue
        try:
            parsed = read_value(value)
        except (yaml.YAMLError, ValueError, RecursionError):
            problems.append(f'override "{text}": the value is broken YAML. Quote it, for example `{key}="..."`.')
            continue
        _put(over, parts, parsed)
    return over, problems


def _put(tree: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[parts[-1]] = value


def _expand(raw: dict[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """`train.steps: 10` at the top of a file means the same as the nested form; both must agree where both stand."""
    out = {key: value for key, value in raw.items() if not (isinstance(key, str) and "." in key.strip("."))}
    problems: list[str] = []
    for key, value in raw.items():
        if key not in out:
            for part in reversed(key.split(".")):
                value = {part: value}
            _join(out, value, (), problems)
    return out, problems


def _join(tree: dict[Any, Any], more: dict[Any, Any], path: Path, problems: list[str]) -> None:
    """Put more keys into a tree, with a sentence for each that is there already and says something else."""
    for key, value in more.items():
        present = tree.setdefault(key, value)
        if isinstance(present, dict) and isinstance(value, dict) and present is not value:
            tree[key] = present = dict(present)
            _join(present, value, (*path, key), problems)
        elif present != value or type(present) is not type(value):
            name = ".".join(map(str, (*path, key)))
            problems.append(
                f"`{name}` stands twice, nested as {shown(present)} and dotted as {shown(value)}. Keep one of the two."
            )


def _no_text_keys(node: Any) -> list[str]:
    """Take out keys that are no text (`1: x`, `on: y`), with a sentence for each."""
    problems: list[str] = []
    if isinstance(node, dict):
        problems += [
            f"key {shown(key)} is not text; got {shown(node.pop(key))}. Quote it, or remove it."
            for key in list(node)
            if not isinstance(key, str)
        ]
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            problems += _no_text_keys(item)
    return problems


def _laid_over(written: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Mappings joined key by key; anything else is replaced, whatever stood there."""
    both = {
        key: _laid_over(written[key], value)
        for key, value in over.items()
        if isinstance(value, dict) and isinstance(written.get(key), dict)
    }
    return {**written, **over, **both}


def _merged(written: dict[str, Any], over: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Overrides over the file; `${section.key}` takes the value of another key, the environment is out of reach."""
    try:
        merged = OmegaConf.create(_laid_over(written, over))
        if "${oc.env" in json.dumps(OmegaConf.to_container(merged, resolve=False), default=str):
            return written, ["`${oc.env:...}` is refused: a config does not read the environment. Write the value."]
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        return written, [f"interpolation in the config fails: {str(error).splitlines()[0]}. Write the value itself."]
    assert isinstance(plain, dict)
    return json.loads(json.dumps(plain, default=str)), []
