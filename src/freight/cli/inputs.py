"""What commands take: a config with overrides, or something that holds a model.

A model is named by a config (.yaml), a run folder (config.yaml), a checkpoint folder inside one, a Hugging Face folder
(config.json) or a .gguf file; the name alone decides which.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from freight.cli.exits import remark
from freight.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from freight.config.schema import Config

Kind = Literal["config", "run", "checkpoint", "model"]

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML config.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example train.steps=10.", show_default=False),
]
ModelPath = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="Config, run folder, Hugging Face folder or .gguf file.", show_default=False),
]


def read_config(path: Path, overrides: list[str] | None, *, check_files: bool = True) -> Config:
    """Load a config; notices about foreign names go to stderr.

    Raises:
        ConfigError: All its faults.
    """
    from freight.config.load import load_config

    return load_config(path, overrides or (), notice=remark, check_files=check_files)


def kind_of(path: Path) -> Kind:
    """What a path that names a model is.

    Raises:
        CheckpointError: None of the things that can hold a model.
    """
    if path.suffix in (".yaml", ".yml"):
        return "config"
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder. Give a config, run folder, model folder or .gguf file.")
    if path.is_file():
        return "model"  # A .gguf or config.json; anything else is refused by the reader, by name.
    if (path / "config.json").exists():
        return "model"
    if (path / "config.yaml").exists():
        return "run"
    if (path / "COMPLETE").exists() or (path / "meta.json").exists():
        return "checkpoint"
    raise CheckpointError(
        f"{path}: holds no model (no config.json, no config.yaml). Give a run folder, a Hugging Face folder or a .gguf "
        "file."
    )


def run_folder_of(path: Path, kind: Kind) -> Path:
    """The run folder of a run or of one of its checkpoints.

    Raises:
        CheckpointError: A checkpoint that stands alone.
    """
    if kind == "run":
        return path
    for folder in path.resolve().parents:
        if (folder / "config.yaml").exists():
            return folder
    raise CheckpointError(f"{path}: no config.yaml above this checkpoint. Put it back below its run folder.")


def run_config(folder: Path) -> Config:
    """The configuration of a run; the data it was trained on may be gone."""
    return read_config(folder / "config.yaml", None, check_files=False)


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


def load_model(path: Path, kind: Kind, overrides: list[str] | None = None) -> tuple[Any, Any, Config | None]:
    """Model, tokenizer and, where there is one, configuration.

    Returns:
        A `Decoder` in float32 on this machine's device, its tokenizer, and the config of a config or run.
    """
    from freight.assemble.build import load_for_inference
    from freight.data.tokenizer import load_tokenizer

    if kind == "model":
        return load_for_inference(path), load_tokenizer(path), None
    if kind == "config":
        config = read_config(path, overrides, check_files=False)
        if config.model.hf is None:
            raise ConfigError(f"{path}: `model.hf` is not set, so there are no weights. Give the run folder instead.")
        return load_for_inference(config.model.hf), load_tokenizer(tokenizer_path(config)), config
    config = run_config(run_folder_of(path, kind))
    return load_for_inference(path), load_tokenizer(tokenizer_path(config)), config


def refuse_overrides(overrides: list[str] | None, kind: Kind) -> None:
    """Overrides belong to a config.

    Raises:
        ConfigError: There are some, and no config.
    """
    if overrides and kind != "config":
        raise ConfigError(f"overrides need a config; got {' '.join(overrides)} with a {kind}. Remove them.")
