"""Import: the architecture and the weights of a Hugging Face folder or a GGUF file.

A folder with a config.json and no weights at all stands for random weights: `open_weights` returns None and the caller
initialises. A folder with weights in a form that is not read (pickles, parts without index) is an error, never random.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freight.checkpoint.families import FAMILIES
from freight.checkpoint.gguf_file import GgufFile
from freight.checkpoint.hf_config import architecture_from
from freight.checkpoint.hf_export import ADAPTER_FILE
from freight.checkpoint.tensor_files import SafetensorsFolder, has_weights, read_json
from freight.checkpoint.weights import Weights
from freight.config.architecture import Architecture
from freight.errors import CheckpointError


def read_architecture(path: str | Path) -> Architecture:
    """What the model is.

    Args:
        path: A folder with config.json, a config.json, or a .gguf file.

    Raises:
        CheckpointError: No such file; damaged; an unknown family; features that the decoder does not have.
    """
    path = Path(path).expanduser()
    return _architecture(path, GgufFile(path).config if _is_gguf(path) else read_json(_config_of(path)))


def open_weights(path: str | Path, arch: Architecture) -> Weights | None:
    """The weights, all checked against an architecture and none read yet.

    Args:
        path: As for `read_architecture`.
        arch: What `read_architecture` returned, with the user's changes; a larger `vocab_size` grows the embeddings.

    Returns:
        The weights, or None where there is only a config.json: the caller initialises at random.

    Raises:
        CheckpointError: Weights are missing, left over, damaged, of another shape, or pickled.
    """
    path = Path(path).expanduser()
    if _is_gguf(path):
        files = GgufFile(path)
        stored = _architecture(path, files.config)
    else:
        stored = read_architecture(path)
        if path.is_file() or not has_weights(path):
            return None
        files = SafetensorsFolder(path)
    assert stored.family is not None
    return Weights(files, FAMILIES[stored.family], arch, stored.vocab_size, str(path))


def _architecture(path: Path, config: dict[str, Any]) -> Architecture:
    try:
        return architecture_from(config)
    except CheckpointError as error:
        raise CheckpointError(f"`{path}`: {error}") from None


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def _config_of(path: Path) -> Path:
    if path.is_file() and path.suffix == ".json":
        return path
    if path.is_file():
        raise CheckpointError(f"`{path}` is neither a folder, a config.json nor a .gguf file.")
    if not path.is_dir():
        hint = f" A model of the hub is fetched with `hf download {path} --local-dir DIR`." if _is_hub(path) else ""
        raise CheckpointError(f"`{path}` does not exist.{hint}")
    refuse_adapter(path)
    if not (path / "config.json").exists():
        raise CheckpointError(f"`{path}` has no config.json, so it is not a Hugging Face folder.")
    return path / "config.json"


def refuse_adapter(path: Path) -> None:
    """Say what to do with a folder that holds an adapter and no model.

    Raises:
        CheckpointError: It does.
    """
    if (path / ADAPTER_FILE).exists() and not (path / "config.json").exists():
        base = read_json(path / ADAPTER_FILE).get("base_model_name_or_path")
        raise CheckpointError(
            f"`{path}` is an adapter of {base}, not a model. Name the model {base}; or merge the two, if Freight "
            "trained it with `freight export RUN DIR --merge`, else with peft's `merge_and_unload`, and name DIR."
        )


def _is_hub(path: Path) -> bool:
    return len(path.parts) == 2 and not path.is_absolute()
