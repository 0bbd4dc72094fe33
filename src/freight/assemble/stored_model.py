"""A model that lies on disk, whatever it lies in, and what can be done with it: load it, or write it as another folder.

The name alone decides what it is: a Hugging Face folder (config.json) or .gguf file, a run folder (config.yaml), or one
checkpoint of a run (meta.json). A run stands for its newest checkpoint that verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freight.assemble.build import Weights, build_for_inference
from freight.assemble.trained_adapter import TrainedAdapter
from freight.checkpoint import saved_state
from freight.checkpoint.hf_export import check_output, export_model
from freight.checkpoint.hf_import import open_weights, read_architecture, refuse_adapter
from freight.checkpoint.weights import parameter_shapes
from freight.config.architecture import Architecture
from freight.config.load import load_config
from freight.config.schema import AttentionConfig, Config
from freight.data.render.tokenizer import load_tokenizer
from freight.errors import CheckpointError
from freight.nn.decoder import Decoder


@dataclass(frozen=True)
class StoredModel:
    """A model on disk; weights are not read yet.

    Args:
        path: As the user named it.
        arch: What it is.
        weights: Tensors by canonical name.
        tokenizer: Path of its tokenizer; None if it has none of its own.
        config: Of the run that made it; None for a folder or GGUF.
        adapter: What an adapter run trained, already merged into `weights`; None for other models.
    """

    path: Path
    arch: Architecture
    weights: Weights
    tokenizer: str | None
    config: Config | None = None
    adapter: TrainedAdapter | None = None


def open_stored_model(path: str | Path, warn: Callable[[str], None] | None = None) -> StoredModel:
    """Find out what a path holds.

    Args:
        path: Run folder, checkpoint, Hugging Face folder or .gguf file.
        warn: Told about damaged checkpoints that are passed over.

    Raises:
        CheckpointError: It holds no model, or a damaged one.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder. Give a run folder, model folder or .gguf file.")
    if (path / "config.yaml").exists():
        config = load_config(path / "config.yaml", check_files=False)
        directory = Path(config.checkpoint.dir).expanduser() if config.checkpoint.dir else path / "checkpoints"
        newest = saved_state.newest_good(directory, warn or (lambda _: None))
        if newest is None:
            raise CheckpointError(f"{directory}: no complete checkpoint yet. Train with checkpoint.every_steps set.")
        return _of_checkpoint(path, newest, config)
    if (path / saved_state.META).exists():
        return _of_checkpoint(path, path, None)
    refuse_adapter(path)
    if path.is_dir() and not (path / "config.json").exists():
        raise CheckpointError(
            f"{path}: holds no model (no config.json, no config.yaml). Give a run folder, a Hugging Face folder or a "
            ".gguf file."
        )
    arch = read_architecture(path)
    weights = open_weights(path, arch)
    if weights is None:
        raise CheckpointError(f"{path}: there is only a config.json and no weights. Give a folder with weights.")
    return StoredModel(path, arch, weights, str(path))


def load_for_inference(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: AttentionConfig | None = None,
    device: torch.device | str = "cpu",
) -> Decoder:
    """A decoder for evaluation and generation, as `build_for_inference`, from anything that holds a model."""
    model = open_stored_model(path)
    return build_for_inference(model.arch, model.weights, dtype=dtype, attention=attention, device=device)


def convert_model(
    source: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    merge: bool = False,
    force: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> StoredModel:
    """Write a model as a Hugging Face folder: weights, config, tokenizer, chat template.

    Of an adapter run the adapter alone is written, for peft to load onto its base, unless `merge`.

    Args:
        source: As for `open_stored_model`.
        output: Folder to write, complete or not there at all.
        dtype: Of the weights written; None = bf16, or fp32 for an adapter.
        merge: Write the whole model of an adapter run.
        force: Replace an existing folder.
        progress: Draws `(done, total, what)`.

    Returns:
        What was read.

    Raises:
        CheckpointError: The source holds no model, or the output exists.
    """
    output = Path(output).expanduser()
    check_output(output, force)
    model = open_stored_model(source)
    if merge and model.adapter is None:
        raise CheckpointError(f"`{source}` has no adapter, so --merge has nothing to merge. Leave it out.")
    if model.adapter is not None and not merge:
        model.adapter.write(output, dtype or "fp32", load_tokenizer(model.tokenizer) if model.tokenizer else None)
        return model
    if model.adapter is not None and output.resolve() == Path(model.adapter.base_path or "-").resolve():
        raise CheckpointError(f"`{output}` is the adapter's base, which its checkpoints need. Use another path.")
    tokenizer = load_tokenizer(model.tokenizer) if model.tokenizer else None
    export_model(
        model.weights.load,
        model.arch,
        output,
        dtype=dtype or "bf16",
        tokenizer=tokenizer,
        force=force,
        progress=progress,
    )
    return model


def _of_checkpoint(path: Path, checkpoint: Path, config: Config | None) -> StoredModel:
    meta = saved_state.load(checkpoint, {})
    config = config or Config.model_validate(meta["config"])
    arch = Architecture.model_validate(meta["architecture"])
    tokenizer = config.data.tokenizer or config.model.hf
    if config.adapter is None:
        return StoredModel(path, arch, SavedWeights(checkpoint, arch), tokenizer, config)
    adapter = TrainedAdapter(checkpoint, config, arch, meta.get("frozen", {}))
    return StoredModel(path, arch, adapter, tokenizer, config, adapter)


class SavedWeights:
    """Float32 masters of a checkpoint, read all at once when the first is asked for.

    Args:
        checkpoint: A saved state that has been verified.
        arch: Of the model it holds.
    """

    def __init__(self, checkpoint: Path, arch: Architecture) -> None:
        self._checkpoint = checkpoint
        self._arch = arch

    def load(self, name: str) -> Tensor:
        """One tensor."""
        return self._tensors[name]

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        state: dict[str, Any] = {"model": {n: torch.empty(shape) for n, shape in parameter_shapes(self._arch).items()}}
        saved_state.load(self._checkpoint, state, verified=True)
        return state["model"]
