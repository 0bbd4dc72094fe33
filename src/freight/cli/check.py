"""`freight check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from freight.cli.exits import remark, say
from freight.cli.inputs import ConfigPath, Overrides, read_config

if TYPE_CHECKING:
    from freight.config.architecture import Architecture
    from freight.config.schema import Config
    from freight.planner.plan import DataFacts

PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the resolved config and stop.")]


def check(
    config: ConfigPath,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    data: Annotated[bool, typer.Option("--data", help="Also tokenise and pack the data, for exact numbers.")] = False,
) -> None:
    """Validate a config and print what it means, in words."""
    loaded = read_config(config, overrides)
    if print_config:
        show_config(loaded)
        return
    import torch

    from freight.assemble.adapters import targets_for
    from freight.assemble.build import architecture_for, weights_for
    from freight.ops.attention_backends import hardware_of
    from freight.planner.resolve import resolve
    from freight.planner.words import plan_words
    from freight.train.launch import device_bytes

    arch = architecture_for(loaded)
    weights_for(loaded, arch)
    adapted = targets_for(loaded, arch)
    facts = _facts(loaded, arch, tokenise=data)
    if facts is None and not data:
        remark("the data were not read; `--data` reads them, for exact numbers and faults of records")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = device_bytes(device)
    plan = resolve(loaded, arch, data=facts, hardware=hardware_of(device), device_bytes=memory, adapted=adapted)
    for line in plan_words(plan):
        say(line)


def show_config(config: Config) -> None:
    """Print a config with its defaults as comments."""
    from freight.config.yaml_text import to_yaml

    print(to_yaml(config), end="")


def _facts(config: Config, arch: Architecture, *, tokenise: bool) -> DataFacts | None:
    """Facts of the training data; None where they would have to be read, or cannot be known before they are.

    Validation is opened too when `tokenise` is set, so that its faults are found. A packed file is always opened.
    """
    from freight.data.load.open_packed import packed_path
    from freight.data.tokens.tokenise import remarks
    from freight.planner.resolve import data_facts
    from freight.train.console import Progress
    from freight.train.setup import row_opener

    packed = packed_path(config.data, "train")
    if not tokenise and (packed is None or packed.suffix == ".npy"):
        return None
    with Progress() as progress:
        rows_of = row_opener(config, arch, None, progress)
        opened = [rows_of("train")]
        if tokenise and config.data.validation is not None:
            opened.append(rows_of("validation"))
    for rows in opened:
        notices, warnings = remarks(rows.metadata)
        for line in (*notices, *(f"warning: {warning}" for warning in warnings)):
            say(line)
    indexed = opened[0].indexed()
    return None if indexed is None else data_facts(indexed, config.train.epochs)
