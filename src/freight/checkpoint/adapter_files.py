"""Adapter folders as peft reads them: adapter_config.json and adapter_model.safetensors, in the family's names.

Where the family stores several projections as one (`c_attn`, `query_key_value`), each of ours has its own A and B. They
become one pair of larger rank: the A stacked, the B block by block in the rows of their part. The product is the same,
number for number; the folder says so by `rank_pattern` and `alpha_pattern`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from freight.checkpoint.families import FAMILIES, Family, Stored
from freight.checkpoint.hf_config import config_for
from freight.checkpoint.hf_export import ADAPTER_FILE, DTYPES, write_json, write_tokenizer
from freight.checkpoint.layouts import half_from_interleaved
from freight.checkpoint.weights import ROTATED, parameter_shapes, rotary_dim
from freight.checkpoint.whole_folder import whole_folder
from freight.config.architecture import Architecture
from freight.config.schema import AdapterConfig
from freight.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class LowRank:
    """What is trained beside one weight.

    Args:
        a: `[rank, in]`.
        b: `[out, rank]`.
        magnitude: DoRA's lengths of the rows `[out]`; None without DoRA.
    """

    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None

    def merged(self, weight: Tensor, scale: float) -> Tensor:
        """`weight + scale * b @ a` in float32 at least, with DoRA every row scaled to its length."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        out = torch.addmm(weight.to(dtype), self.b.to(dtype), self.a.to(dtype), alpha=scale)
        if self.magnitude is not None:
            out *= (self.magnitude.to(dtype) / torch.linalg.vector_norm(out, dim=1))[:, None]
        return out


@dataclass(frozen=True)
class AdapterTensors:
    """A trained adapter.

    Args:
        low_rank: By the name of our module.
        full: Parameters trained in full, by name.
    """

    low_rank: Mapping[str, LowRank]
    full: Mapping[str, Tensor]

    @classmethod
    def from_parameters(cls, tensors: Mapping[str, Tensor]) -> AdapterTensors:
        """From the trained parameters under their names in the model."""
        found: dict[str, dict[str, Tensor]] = {}
        full: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if match := re.fullmatch(r"(.+)\.lora_(A|B|magnitude_vector)\.\w+\.weight", name):
                found.setdefault(match[1], {})[match[2]] = tensor
            else:
                full[name] = tensor
        return cls({m: LowRank(t["A"], t["B"], t.get("magnitude_vector")) for m, t in found.items()}, full)


def scale_of(adapter: AdapterConfig) -> float:
    """Factor on `B A`."""
    return adapter.alpha / (math.sqrt(adapter.rank) if adapter.use_rslora else adapter.rank)


def stored_modules(arch: Architecture) -> dict[str, str]:
    """Our module names -> the family's; several of ours may share one. Empty where no family fits."""
    try:
        family = _family(arch)
    except CheckpointError:
        return {}
    return {ours: theirs for theirs, _, parts in _modules(family, arch) for ours in parts}


def _family(arch: Architecture) -> Family:
    return FAMILIES[config_for(arch)["model_type"]]


def _modules(family: Family, arch: Architecture) -> Iterator[tuple[str, Stored, list[str]]]:
    """Every stored module: its name, its form, and our names of its parts."""
    for stored in family.modules:
        for layer in range(arch.num_layers) if "{i}" in stored.name else (0,):
            yield (
                stored.name.replace("{i}", str(layer)),
                stored,
                [part.replace("{i}", str(layer)) for part in stored.parts],
            )


def write_adapter(
    tensors: AdapterTensors,
    adapter: AdapterConfig,
    arch: Architecture,
    output: Path,
    *,
    base: str,
    load: Callable[[str], Tensor],
    dtype: str = "fp32",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` loads onto the base.

    Args:
        tensors: What was trained.
        adapter: How.
        arch: Of the base.
        output: Folder to write; replaced if it exists.
        base: Path of the base, for `base_model_name_or_path`.
        load: Fetches a weight of the base by our name; asked only where DoRA adapts part of a stored module.
        dtype: fp32, bf16 or fp16.
        tokenizer: Written beside the weights.

    Raises:
        CheckpointError: No family fits, or the folder cannot be written.
    """
    writer = _Writer(tensors, adapter, arch, load)
    files = {f"base_model.model.{name}": tensor.to("cpu", DTYPES[dtype]) for name, tensor in writer.tensors.items()}
    config = {"base_model_name_or_path": base, **writer.config()}
    try:
        with whole_folder(output) as folder:
            write_json(folder / ADAPTER_FILE, config)
            save_file({name: tensor.contiguous() for name, tensor in files.items()}, folder / WEIGHTS, {"format": "pt"})
            if tokenizer is not None:
                write_tokenizer(folder, tokenizer)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(f"`{output}` cannot be written: {reason}.") from None


class _Writer:
    """Our tensors -> the family's, and the config that goes with them."""

    def __init__(
        self, tensors: AdapterTensors, adapter: AdapterConfig, arch: Architecture, load: Callable[[str], Tensor]
    ) -> None:
        self._adapter, self._arch, self._load = adapter, arch, load
        self._family = _family(arch)
        self._shapes = parameter_shapes(arch)
        self._modules = list(_modules(self._family, arch))
        self.tensors: dict[str, Tensor] = {}
        self._parts: dict[str, int] = {}  # adapted stored module -> how many of ours it holds
        self._full: list[str] = []
        for name, stored, parts in self._modules:
            held = {part: tensors.low_rank[part] for part in parts if part in tensors.low_rank}
            if held:
                self._add_low_rank(name, stored, parts, held)
            self._add_full(name, stored, parts, tensors.full)
        self._tie_head()

    def config(self) -> dict[str, Any]:
        """adapter_config.json."""
        adapter = self._adapter
        fused = {name: count for name, count in self._parts.items() if count > 1}
        # Of each part the scale, alpha / rank or alpha / sqrt(rank), stays what it was at `count` times the rank.
        growth = math.sqrt if adapter.use_rslora else float
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "r": adapter.rank,
            "lora_alpha": _plain(adapter.alpha),
            "lora_dropout": adapter.dropout,
            "target_modules": self._short_names(),
            "modules_to_save": self._full or None,
            "bias": "none",
            "fan_in_fan_out": any(stored.layout.transposed for name, stored, _ in self._modules if name in self._parts),
            "use_rslora": adapter.use_rslora,
            "use_dora": adapter.use_dora,
            "rank_pattern": {name: adapter.rank * count for name, count in fused.items()},
            "alpha_pattern": {name: _plain(adapter.alpha * growth(count)) for name, count in fused.items()},
        }

    def _short_names(self) -> list[str]:
        """Last parts of names where they mean exactly the adapted modules, whole names elsewhere."""
        short: dict[str, list[str]] = {}
        for name, _, _ in self._modules:
            short.setdefault(name.rsplit(".", 1)[-1], []).append(name)
        out: list[str] = []
        for name in self._parts:
            last = name.rsplit(".", 1)[-1]
            out.append(last if all(other in self._parts for other in short[last]) else name)
        return list(dict.fromkeys(out))

    def _add_low_rank(self, name: str, stored: Stored, parts: list[str], held: Mapping[str, LowRank]) -> None:
        rank, layout = self._adapter.rank, replace(stored.layout, transposed=False)  # B is [out, rank] everywhere
        columns = {part: number * rank for number, part in enumerate(held)}
        rows: list[Tensor] = []
        lengths: list[Tensor] = []
        for part in parts:
            weight = f"{part}.weight"
            b = torch.zeros(self._shapes[weight][0], len(held) * rank)  # [rows of the part, rank of all]
            if part in held:
                b[:, columns[part] : columns[part] + rank] = held[part].b
            rows.append(self._in_half_layout(weight, b))
            if self._adapter.use_dora:
                length = held[part].magnitude if part in held else _row_lengths(self._load(weight))
                assert length is not None
                lengths.append(self._in_half_layout(weight, length))
        self._parts[name] = len(held)
        self.tensors[f"{name}.lora_A.weight"] = torch.cat([pair.a for pair in held.values()])
        self.tensors[f"{name}.lora_B.weight"] = layout.join(rows, self._arch.dims_per_head)
        if lengths:
            self.tensors[f"{name}.lora_magnitude_vector"] = layout.join(lengths, self._arch.dims_per_head)

    def _add_full(self, name: str, stored: Stored, parts: list[str], full: Mapping[str, Tensor]) -> None:
        for kind in ("weight", "bias"):
            names = [f"{part}.{kind}" for part in parts]
            if names[0] in full:
                rows = [self._in_half_layout(part, full[part]) for part in names]
                self.tensors[f"{name}.{kind}"] = stored.layout.join(rows, self._arch.dims_per_head)
                self._full += [name] if name not in self._full else []

    def _tie_head(self) -> None:
        """Name the head too, with the same numbers: what peft trains in full it copies, and so unties."""
        embedding, head = (
            next(stored.name for stored in self._family.modules if stored.parts == (part,))
            for part in ("embed_tokens", "head")
        )
        if self._arch.tie_embeddings and embedding in self._full:
            self.tensors[f"{head}.weight"] = self.tensors[f"{embedding}.weight"].clone()
            self._full.append(head)

    def _in_half_layout(self, name: str, rows: Tensor) -> Tensor:
        if self._arch.rope.interleaved and ROTATED.search(name):
            return half_from_interleaved(rows, self._arch.dims_per_head, rotary_dim(self._arch))
        return rows


def _row_lengths(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(weight.dtype, torch.float32))


def _plain(number: float) -> float:
    """An integer where it is one: what most readers expect of alpha."""
    return int(number) if number == int(number) else number
