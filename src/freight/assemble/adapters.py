"""Adapters: which modules they change, putting them into a model, and a model's weights with them merged.

The base is frozen in the compute dtype, once: no master, no gradient, no optimizer state, and no shard, since within a
step every rank holds every weight whole anyway. What is trained is float32 like all masters.

The peft library makes the modules. Importing it takes seconds, so that happens where a model gets an adapter and
nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from freight.checkpoint.adapter_files import stored_modules
from freight.config.adapter_targets import AdapterTargets, Module, choose_full, choose_lora
from freight.config.architecture import Architecture
from freight.config.schema import AdapterConfig, Config
from freight.errors import ConfigError
from freight.nn.decoder import Decoder
from freight.nn.init import fill_drawn, uniform
from freight.nn.linear import Linear
from freight.parallel.data import fill, whole


def targets_for(config: Config, arch: Architecture) -> AdapterTargets | None:
    """The modules that `adapter` means in a model; None without it.

    Raises:
        ConfigError: As `adapter_targets`.
    """
    return None if config.adapter is None else adapter_targets(config.adapter, arch)


def adapter_targets(adapter: AdapterConfig, arch: Architecture) -> AdapterTargets:
    """The modules that an adapter means in a model.

    Raises:
        ConfigError: A name matches nothing, or a module is chosen twice.
    """
    with torch.device("meta"):
        model = Decoder(arch)
    stored = stored_modules(arch)
    kinds = dict(_leaves(model))
    names: dict[str, tuple[str, ...]] = {name: (name, stored[name]) if name in stored else (name,) for name in kinds}
    if arch.tie_embeddings:
        names["embed_tokens"] += ("head", stored["head"]) if "head" in stored else ("head",)
    modules = [Module(names[name], linear=isinstance(kind, Linear) and name != "head") for name, kind in kinds.items()]
    lora = choose_lora(modules, adapter.target_modules, adapter.layers)
    full = choose_full(modules, adapter.modules_to_save) if adapter.modules_to_save else []
    if both := sorted(set(lora) & set(full)):
        raise ConfigError(
            f"`adapter.modules_to_save` trains {both[0]} in full, and `adapter.target_modules` adapts it too. "
            "Name it in one of them."
        )
    for name in full:
        if apart := [other for other in stored if stored[other] == stored.get(name) and other not in full]:
            raise ConfigError(
                f"`adapter.modules_to_save` names {name}, a part of {stored[name]}, without {apart[0]}; they are saved "
                f"as one. Use {stored[name].rsplit('.', 1)[-1]}."
            )
    return AdapterTargets(tuple(lora), tuple(full))


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have parameters of their own."""
    return ((n, m) for n, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None)


def add_adapter(model: Decoder, adapter: AdapterConfig, targets: AdapterTargets, dtype: torch.dtype) -> list[nn.Module]:
    """Freeze a model in `dtype` and put A and B beside its targets, in place, on the device where it is.

    Args:
        model: Not yet sharded; usually on the meta device.
        adapter: What to add.
        targets: Of `adapter_targets`.
        dtype: Of frozen weights; what is trained keeps the dtype that parameters are made in.

    Returns:
        Modules whose parameters must compute in the masters' dtype: the rows' lengths of DoRA.
    """
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415 - takes seconds

    from freight.nn.lora import LoraLinear, Magnitude  # noqa: PLC0415 - imports peft

    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType] (any number is only divided)
        lora_dropout=adapter.dropout,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        target_modules=list(targets.lora),
        init_lora_weights=False,
    )
    config._register_custom_module({Linear: LoraLinear})
    with torch.device(next(model.parameters()).device):
        inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        trained = base_name(name) is None or name.rpartition(".")[0] in targets.full
        parameter.requires_grad_(trained)
        if not trained:
            parameter.data = parameter.data.to(dtype)
    return [module for module in model.modules() if isinstance(module, Magnitude)]


def base_name(name: str) -> str | None:
    """Name of a parameter in the model without adapter; None if it is the adapter's own."""
    return None if ".lora_" in name else name.replace(".base_layer.", ".")


@torch.no_grad()
def init_adapter(model: Decoder, seed: int) -> None:
    """Fill the adapter's parameters: A uniform within `1 / sqrt(in)`, B zero, DoRA lengths those of the base.

    So the model computes what its base does until the first update. A is drawn by (seed, name) alone.

    Args:
        model: With its base weights in place.
        seed: Of the whole model.
    """
    from freight.nn.lora import LoraLinear, row_norms  # noqa: PLC0415 - imports peft

    for name, module in model.named_modules():
        if not isinstance(module, LoraLinear):
            continue
        a, b, base = module.a.weight, module.b.weight, module.frozen.weight
        fill_drawn(a, a.shape, uniform(1 / math.sqrt(a.shape[1])), seed, f"{name}.lora_A.weight")
        b.zero_()
        if module.magnitude is not None:
            fill(
                module.magnitude.weight, row_norms(base, whole(a).to(base.dtype), whole(b).to(base.dtype), module.scale)
            )
