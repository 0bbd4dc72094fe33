"""What an architecture's numbers must satisfy together. Every rule is one small function that yields sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator

from freight.config.architecture import Architecture, RopeConfig, RopeScaling
from freight.config.keys import either, shown

# Keys each scaling type needs, and those it may have beside `type`.
_NEEDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
_TAKES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": ("original_max_position_embeddings",),
    "llama3": ("original_max_position_embeddings",),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor"),
    "proportional": ("factor",),
}  # fmt: skip


def architecture_faults(arch: Architecture) -> list[str]:
    """Everything wrong with an architecture, one sentence each."""
    return [*_heads(arch), *_attention(arch), *_layers(arch), *_positions(arch), *_norms(arch)]


def _heads(arch: Architecture) -> Iterator[str]:
    heads, groups = arch.num_attention_heads, arch.groups
    if groups > heads:
        yield (
            f"`model.num_query_groups` must be between 1 and `model.num_attention_heads`; got {groups} with {heads} "
            "heads. Use null for MHA."
        )
    elif heads % groups:
        divisors = [n for n in range(1, heads) if heads % n == 0]
        yield (
            f"`model.num_query_groups` must divide `model.num_attention_heads`; {groups} does not divide {heads}. "
            f"Use {_one_of(divisors)}, or null for MHA."
        )
    if arch.head_dim is None and arch.hidden_size % heads:
        yield (
            f"`model.head_dim` is null and `model.hidden_size` {arch.hidden_size} is not a multiple of "
            f"`model.num_attention_heads` {heads}. Set `model.head_dim`."
        )


def _attention(arch: Architecture) -> Iterator[str]:
    if arch.sliding_window is not None and arch.sliding_window < 1:
        yield (
            f"`model.sliding_window` must be at least 1 or null; got {arch.sliding_window}. "
            "Use null for full attention."
        )
    for key in ("attention_softcap", "final_softcap"):
        cap = getattr(arch, key)
        if cap is not None and not (cap > 0 and math.isfinite(cap)):
            yield (
                f"`model.{key}` must be a finite number above 0, or null; got {shown(cap)}. Use null to switch it off."
            )


def _layers(arch: Architecture) -> Iterator[str]:
    if arch.layer_types is None:
        return
    if len(arch.layer_types) != arch.num_layers:
        yield (
            f"`model.layer_types` must have one entry per layer, `model.num_layers` = {arch.num_layers}; "
            f"got {len(arch.layer_types)}. Add or remove entries, or use null."
        )
    sliding = "sliding_attention" in arch.layer_types
    if sliding and arch.sliding_window is None:
        yield "`model.layer_types` has `sliding_attention` but `model.sliding_window` is null. Set the window."
    if not sliding and arch.sliding_window is not None:
        yield (
            f"`model.sliding_window` {arch.sliding_window} has no effect: no entry of `model.layer_types` is "
            "`sliding_attention`. Use null, or change `model.layer_types`."
        )


def _norms(arch: Architecture) -> Iterator[str]:
    if arch.norm_offset and arch.norm != "rmsnorm":
        yield f"`model.norm_offset` needs `model.norm: rmsnorm`; got `{arch.norm}`. Use false, or rmsnorm."
    if arch.parallel_residual and arch.norm_placement == "sandwich":
        yield (
            "`model.parallel_residual` cannot be combined with `model.norm_placement: sandwich`; got true. "
            "Use `norm_placement: pre`."
        )


def _positions(arch: Architecture) -> Iterator[str]:
    written = arch.model_fields_set
    if arch.position_embedding == "learned":
        for key in ("rope", "rope_sliding"):
            if key in written and getattr(arch, key) is not None:
                yield f"`model.{key}` has no effect with `model.position_embedding: learned`. Remove it, or use rope."
        return
    if arch.head_dim is None and arch.hidden_size % arch.num_attention_heads:
        return  # Reported by `_heads`; nothing about dims can be said.
    yield from _rope(arch, arch.rope, "model.rope")
    if arch.rope_sliding is not None:
        if arch.sliding_window is None:
            yield "`model.rope_sliding` has no effect while `model.sliding_window` is null. Remove it, or set a window."
        yield from _rope(arch, arch.rope_sliding, "model.rope_sliding")


def _rope(arch: Architecture, rope: RopeConfig, key: str) -> Iterator[str]:
    dim = arch.dims_per_head
    rotated = int(dim * rope.percent)
    proportional = rope.scaling is not None and rope.scaling.type == "proportional"
    if proportional:
        if dim % 2:
            yield f"`{key}.scaling.type: proportional` rotates all dims; head_dim {dim} must be even. Use {dim + 1}."
    elif rotated % 2 or rotated == 0:
        below, above = rotated - rotated % 2, rotated - rotated % 2 + 2
        options = [f"{n / dim:.6g} ({n} dims)" for n in (above, below) if 0 < n <= dim]
        fix = f"Use {' or '.join(options)}." if options else "Use `position_embedding: learned`, or a larger head_dim."
        yield (
            f"`{key}.percent` {rope.percent:g} of head_dim {dim} rotates {rotated} dims; the number must be even and "
            f"above 0. {fix}"
        )
    if rope.scaling is not None:
        yield from _scaling(arch, rope.scaling, rotated, f"{key}.scaling")


def _scaling(arch: Architecture, scaling: RopeScaling, rotated: int, key: str) -> Iterator[str]:
    kind = scaling.type
    missing = [name for name in _NEEDS[kind] if getattr(scaling, name) is None]
    if missing:
        names = ", ".join(f"`{key}.{name}`" for name in missing)
        yield f"{names} {'is' if len(missing) == 1 else 'are'} missing; `{kind}` needs {_listed(_NEEDS[kind])}. Set it."
    useful = {"type", *_NEEDS[kind], *_TAKES[kind]}
    for name in sorted(scaling.model_fields_set - useful):
        if getattr(scaling, name) is not None:
            yield (
                f"`{key}.{name}` has no effect with `type: {kind}`, which takes "
                f"{_listed((*_NEEDS[kind], *_TAKES[kind]))}. Remove it."
            )
    for name in ("factor", "original_max_position_embeddings"):
        value = getattr(scaling, name)
        if value is not None and value < 1:
            yield f"`{key}.{name}` must be at least 1; got {value:g}. Use the factor by which positions are stretched."
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if kind == "llama3" and low is not None and high is not None and not low < high:
        yield f"`{key}.low_freq_factor` must be below `{key}.high_freq_factor`; got {low:g} and {high:g}. Swap them."
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        if kind == "longrope" and factors is not None and len(factors) != rotated // 2:
            yield (
                f"`{key}.{name}` has {len(factors)} numbers; head_dim {arch.dims_per_head} with {rotated} rotated dims "
                f"needs {rotated // 2}."
            )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "no other key"


def _one_of(numbers: list[int]) -> str:
    return either(numbers).replace("`", "") if numbers else "1"
