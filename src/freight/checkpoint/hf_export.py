"""Export: a Hugging Face folder of the model's family, complete or not there at all.

Readers are transformers 4 and 5 and what builds on them, so some things are written twice (`dtype` and `torch_dtype`,
both spellings of rotary embeddings). Tensors are fetched one by one and written in parts, so the peak is one part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from freight.checkpoint.families import FAMILIES, Stored
from freight.checkpoint.hf_config import config_for
from freight.checkpoint.layouts import half_from_interleaved
from freight.checkpoint.tensor_files import INDEX, SINGLE
from freight.checkpoint.weights import ROTATED, parameter_shapes, rotary_dim, stored_groups
from freight.checkpoint.whole_folder import whole_folder
from freight.config.architecture import Architecture
from freight.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ADAPTER_FILE = "adapter_config.json"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_model(
    tensors: Mapping[str, Tensor] | Callable[[str], Tensor],
    arch: Architecture,
    output: str | Path,
    *,
    dtype: str = "bf16",
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 << 30,
    force: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Path:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads.

    Args:
        tensors: Full parameters by our names, or a function that fetches one.
        arch: The architecture; its family is written, or the first that fits where it is null.
        output: The folder; must not exist, or be empty, unless `force`.
        dtype: bf16, fp16, fp32 or fp64.
        tokenizer: Written beside the weights, with its chat template.
        generation_config: Content of generation_config.json; by default the tokenizer's special tokens.
        max_shard_bytes: Largest file of weights.
        force: Replace an earlier export.
        progress: Called with (tensors done, tensors in all, name).

    Returns:
        The folder.

    Raises:
        CheckpointError: The folder is taken; no family fits; tensors are missing or of wrong shape; the disk is full.
    """
    output = Path(output).expanduser()
    check_output(output, force)
    if dtype not in DTYPES:
        raise CheckpointError(f"`dtype` must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    config = config_for(arch)
    special = {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS} if tokenizer is not None else {}
    torch_dtype = str(DTYPES[dtype]).removeprefix("torch.")
    config.update(special, dtype=torch_dtype, torch_dtype=torch_dtype)
    generation = {name: token for name, token in special.items() if token is not None}
    try:
        with whole_folder(output) as folder:
            write_json(folder / "config.json", config)
            write_json(folder / "generation_config.json", {**generation, **(generation_config or {})})
            _write_weights(
                folder, _Source(tensors, arch, DTYPES[dtype], config["model_type"]), max_shard_bytes, progress
            )
            if tokenizer is not None:
                write_tokenizer(folder, tokenizer)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(f"`{output}` cannot be written: {reason}.") from None
    return output


def check_output(output: Path, force: bool) -> None:
    """Whether an export may be written there; asked before anything expensive is done.

    Raises:
        CheckpointError: The path is taken: by a model or adapter and not `force`, or by anything else.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not any((output / name).exists() for name in ("config.json", ADAPTER_FILE)):
        raise CheckpointError(
            f"`{output}` exists and is not an exported model, so it is not replaced. Use another path."
        )
    if not force:
        raise CheckpointError(f"`{output}` already holds a model. Use another path, or `--force` to replace it.")


class _Source:
    """The stored tensors of the family, made from ours when asked for."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | Callable[[str], Tensor],
        arch: Architecture,
        dtype: torch.dtype,
        family: str,
    ) -> None:
        self._get = tensors if callable(tensors) else tensors.__getitem__
        self._arch, self._dtype = arch, dtype
        self._shapes = parameter_shapes(arch)
        self._groups: dict[str, tuple[Stored, list[str]]] = stored_groups(FAMILIES[family], list(self._shapes))
        if not callable(tensors) and (missing := sorted(self._shapes.keys() - tensors.keys())):
            raise CheckpointError(f"nothing to export for `{missing[0]}` ({len(missing)} missing).")

    def sizes(self) -> dict[str, int]:
        """Bytes of each stored tensor."""
        return {
            name: sum(torch.Size(self._shapes[part]).numel() for part in parts) * self._dtype.itemsize
            for name, (_, parts) in self._groups.items()
        }

    def read(self, name: str) -> Tensor:
        """One stored tensor on the CPU."""
        stored, parts = self._groups[name]
        return stored.layout.join([self._part(part) for part in parts], self._arch.dims_per_head)

    def _part(self, name: str) -> Tensor:
        tensor = self._get(name).detach()
        if tuple(tensor.shape) != self._shapes[name]:
            raise CheckpointError(
                f"`{name}` is {list(tensor.shape)}; the architecture says {list(self._shapes[name])}."
            )
        tensor = tensor.to("cpu", self._dtype)
        if self._arch.rope.interleaved and ROTATED.search(name):
            tensor = half_from_interleaved(tensor, self._arch.dims_per_head, rotary_dim(self._arch))
        return tensor


def _write_weights(
    folder: Path, source: _Source, max_shard_bytes: int, progress: Callable[[int, int, str], None] | None
) -> None:
    sizes = source.sizes()
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    done = 0
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        part: dict[str, Tensor] = {}
        for name in names:
            part[name] = source.read(name)
            places[name] = file
            done += 1
            if progress:
                progress(done, len(sizes), name)
        save_file(part, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places})


def write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The tokenizer with its chat template, under class names that transformers 4 knows too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the same class by the name that transformers 4 knows
        write_json(path, config)
    write_json(folder / "special_tokens_map.json", tokenizer.special_tokens_map)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file as people read it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
