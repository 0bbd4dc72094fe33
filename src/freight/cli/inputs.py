"""What commands take: a config with overrides, or something that holds a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freight.cli.exits import remark
from freight.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from freight.config.schema import Config
    from freight.nn.decoder import Decoder

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML config.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, for example train.steps=10.", show_default=False),
]
ModelPath = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="Config, run folder, Hugging Face folder or .gguf file.", show_default=False),
]


def read_config(
    path: Path,
    overrides: list[str] | None,
    *,
    check_files: bool = True,
    world_size: int | None = None,
    quiet: bool = False,
) -> Config:
    """Load a config; notices about foreign names go to stderr unless `quiet`.

    Raises:
        ConfigError: All its faults.
    """
    from freight.config.load import load_config

    notice = (lambda _: None) if quiet else remark
    return load_config(path, overrides or (), notice=notice, check_files=check_files, world_size=world_size)


def is_config(path: Path | str) -> bool:
    """Whether a path that names a model is a configuration, which alone takes overrides."""
    return Path(path).suffix in (".yaml", ".yml")


def tokenizer_path(config: Config) -> str:
    """Where the tokenizer is.

    Raises:
        ConfigError: Nowhere.
    """
    path = config.data.tokenizer or config.model.hf
    if path is None:
        raise ConfigError(
            "`data.tokenizer` is missing. Set it to a tokenizer folder, a tokenizer.json or a .gguf file."
        )
    return path


def load_model(
    path: Path, overrides: list[str] | None = None
) -> tuple[Decoder, PreTrainedTokenizerBase, Config | None]:
    """Model, tokenizer and, where there is one, configuration.

    Args:
        path: Config, run folder, checkpoint, Hugging Face folder or .gguf file.
        overrides: Only with a config.

    Returns:
        A decoder in float32 on this machine's device, its tokenizer, and the config of a config or run.

    Raises:
        ConfigError: Overrides without a config, or a config that names no weights or no tokenizer.
        CheckpointError: No model there.
    """
    import torch

    from freight.assemble.build import architecture_for, build_for_inference, weights_for
    from freight.assemble.stored_model import open_stored_model
    from freight.config.model_checks import architecture_faults
    from freight.data.render.tokenizer import load_tokenizer

    if is_config(path):
        config = read_config(path, overrides, check_files=False)
        if config.model.hf is None:
            raise ConfigError(f"{path}: `model.hf` is not set, so there are no weights. Give the run folder instead.")
        if config.adapter is not None:
            remark(f"{path}: this is the base, {config.model.hf}; name the run folder to see it with its adapter")
        arch = architecture_for(config)
        if faults := architecture_faults(arch):
            raise ConfigError(*faults)
        weights = weights_for(config, arch)
        if weights is None:
            raise ConfigError(f'`model.hf` "{config.model.hf}" has no weights. Give a folder with weights, or a run.')
    elif overrides:
        raise ConfigError(f"overrides need a config; got {' '.join(overrides)} with {path}. Remove them.")
    else:
        stored = open_stored_model(path, remark)
        config, arch, weights = stored.config, stored.arch, stored.weights
    tokenizer = load_tokenizer(tokenizer_path(config) if config else str(path))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention = config.attention if config else None
    return build_for_inference(arch, weights, attention=attention, device=device), tokenizer, config
