"""Which modules an adapter changes: names as people write them, matched against names as modules have them.

People write names of the Hugging Face family they know (`c_attn`, `model.layers.1.self_attn.q_proj`), so a module may
have several names; it is chosen if any of them matches. A name that matches nothing is an error, never passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from freight.config.messages import did_you_mean
from freight.errors import ConfigError

ALL_LINEAR = "all-linear"
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class AdapterTargets:
    """The modules of one model that an adapter changes, by our names.

    Args:
        lora: Linear modules that get A and B beside them.
        full: Modules trained as they are.
    """

    lora: tuple[str, ...]
    full: tuple[str, ...] = ()


@dataclass(frozen=True)
class Module:
    """What can be chosen.

    Args:
        names: Every full name it goes by; ours first.
        linear: It can have A and B.
        everywhere: `all-linear` means it too.
    """

    names: tuple[str, ...]
    linear: bool = True
    everywhere: bool = True


def choose_lora(modules: Sequence[Module], wanted: str | Sequence[str], layers: Sequence[int] | None) -> list[str]:
    """Modules that get A and B.

    Args:
        modules: Of the model, in its order.
        wanted: `adapter.target_modules`: `all-linear`, a regex that must match a whole name, or names that are equal
            to one or end it after a dot.
        layers: `adapter.layers`: the first number of a name; None = all.

    Returns:
        Our names, in the model's order.

    Raises:
        ConfigError: An entry matches nothing that can have A and B, or no module is left.
    """
    key = "adapter.target_modules"
    if wanted == ALL_LINEAR:
        chosen = [module for module in modules if module.linear and module.everywhere]
    elif isinstance(wanted, str):
        chosen = _by_pattern(modules, wanted, key)
    else:
        chosen = _by_name(modules, wanted, key, linear=True)
    if layers is not None:
        known = sorted({number for module in modules if (number := _layer(module)) is not None})
        if absent := [layer for layer in layers if layer not in known]:
            last = f"layers 0 to {known[-1]}" if known else "no layers"
            raise ConfigError(f"`adapter.layers` names layer {absent[0]}; the model has {last}. Use one of these.")
        chosen = [module for module in chosen if _layer(module) in layers]
        if not chosen:
            raise ConfigError(
                f"`adapter.layers` {list(layers)} leaves no module of `{key}`; got {_shown(wanted)}. Use other layers."
            )
    return [module.names[0] for module in chosen]


def choose_full(modules: Sequence[Module], wanted: Sequence[str]) -> list[str]:
    """Modules trained in full (`adapter.modules_to_save`), by names as in `choose_lora`.

    Raises:
        ConfigError: An entry matches nothing.
    """
    return [module.names[0] for module in _by_name(modules, wanted, "adapter.modules_to_save", linear=False)]


def _by_pattern(modules: Sequence[Module], pattern: str, key: str) -> list[Module]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"`{key}` is no regular expression ({error}); got {_shown(pattern)}. Correct it.") from None
    found = [module for module in modules if any(compiled.fullmatch(name) for name in module.names)]
    chosen = [module for module in found if module.linear]
    if not chosen:
        what = f"only {found[0].names[0]}, which is no linear layer" if found else "no whole module name"
        raise ConfigError(
            f"`{key}` {_shown(pattern)} matches {what}. A text is a regex for whole names such as "
            f"{_an_example(modules)}; a name goes into a list: `[{pattern}]`."
        )
    return chosen


def _by_name(modules: Sequence[Module], wanted: Sequence[str], key: str, *, linear: bool) -> list[Module]:
    faults = list(_name_faults(modules, wanted, key, linear=linear))
    if faults:
        raise ConfigError(*faults)
    return [
        module
        for module in modules
        if (module.linear or not linear) and any(_ends(name, entry) for name in module.names for entry in wanted)
    ]


def _name_faults(modules: Sequence[Module], wanted: Sequence[str], key: str, *, linear: bool) -> Iterator[str]:
    if linear and not wanted:
        yield f"`{key}` is empty; got []. Use {ALL_LINEAR}, or name modules such as {_an_example(modules)}."
    for entry in wanted:
        found = [module for module in modules if any(_ends(name, entry) for name in module.names)]
        if found and (not linear or any(module.linear for module in found)):
            continue
        usable = [module for module in modules if module.linear or not linear]
        suffixes = list(dict.fromkeys(name.rsplit(".", 1)[-1] for module in usable for name in module.names))
        if found:
            yield (
                f"`{key}`: {entry} cannot have A and B beside it. Train it in full with "
                f"`adapter.modules_to_save: [{entry}]`, or remove it. Linear modules: {', '.join(suffixes)}."
            )
        else:
            yield f"`{key}`: no module is called {entry}.{did_you_mean(entry, suffixes)} Known: {', '.join(suffixes)}."


def _ends(name: str, entry: str) -> bool:
    return name == entry or name.endswith(f".{entry}")


def _layer(module: Module) -> int | None:
    match = _NUMBER.search(module.names[0])
    return int(match[1]) if match else None


def _an_example(modules: Sequence[Module]) -> str:
    return next((module.names[-1] for module in modules if module.linear), "q_proj")


def _shown(wanted: str | Sequence[str]) -> str:
    return f'"{wanted}"' if isinstance(wanted, str) else str(list(wanted))
