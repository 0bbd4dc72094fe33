"""The small model: as many kinds of layers, the same ratios of heads, everything else narrow."""

from __future__ import annotations

import math

from freight.config.architecture import Architecture, RopeConfig
from freight.planner.execution import ExecutionPlan
from freight.verify.small import Change, Small

HEAD_DIM = 8


def shrink_model(small: Small, arch: Architecture, tokens: int, ranks: tuple[int, int], plan: ExecutionPlan) -> None:
    """Change the keys of `model` and `adapter`.

    Args:
        small: The configuration while it is made.
        arch: Of the user's run.
        tokens: Of a small microbatch.
        ranks: Small context ranks, and those of a row that exchange heads.
        plan: Of the user's run.
    """
    source = small.get("model.hf") or small.get("model.preset")
    small.raw["model"] = {key: value for key, value in arch.model_dump(mode="json", exclude_unset=True).items()}
    if source is not None:
        small.raw["model"].pop("family", None)
        small.changes.append(Change("model", source, "random weights", "nothing is read"))
    layers = _shrink_layers(small, arch)
    _shrink_heads(small, arch, ranks, plan)
    small.put("model.ffn_hidden_size", 16)
    small.put("model.vocab_size", 64)
    spread = round(1.5 / math.sqrt(small.get("model.hidden_size")), 3)
    small.fix("model.init_std", spread, before=arch.init_std, why="so that attention is uneven")
    for key in ("attention_softcap", "final_softcap"):
        if getattr(arch, key) is not None:
            small.fix(f"model.{key}", 3.0, why="so that it bends")
    if arch.clip_qkv is not None:
        small.fix("model.clip_qkv", 1.0, why="so that it cuts")
    _shrink_positions(small, arch, tokens)
    _shrink_adapter(small, arch, layers)


def _shrink_layers(small: Small, arch: Architecture) -> list[int]:
    """Two layers, or one of every kind; returns which layers of the user's model they stand for."""
    kinds = arch.layer_types or (None,)
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    chosen = first if len(first) > 1 else [0, min(1, arch.num_layers - 1)]
    count = small.put("model.num_layers", len(chosen))
    if count != len(chosen):
        return list(range(arch.num_layers))
    if arch.layer_types is not None:
        small.put("model.layer_types", [arch.layer_types[layer] for layer in chosen])
    return chosen


def _shrink_heads(small: Small, arch: Architecture, ranks: tuple[int, int], plan: ExecutionPlan) -> None:
    """As many query heads to a key-value head, and key-value heads to a rank in the same relation."""
    _, row = ranks
    was = 1 if plan.context is None else plan.context.ulysses
    shared = arch.num_attention_heads // arch.groups
    if arch.groups == 1:
        groups = 1
    elif arch.groups < was:
        groups = max(1, row // 2)
    else:
        groups = row if arch.groups % was == 0 else row + 1
        groups = max(groups, 2)
    fewer = shared if shared <= 4 else 4 if shared % 2 == 0 else 3
    while groups * fewer < row:
        fewer *= 2
    heads = small.put("model.num_attention_heads", groups * fewer)
    if arch.num_query_groups is not None:
        groups = small.put("model.num_query_groups", min(groups, heads))
    rope = arch.position_embedding == "rope"
    wide = rope and any(
        int(HEAD_DIM * config.percent) % 2 or int(HEAD_DIM * config.percent) < 2 for config in _ropes(arch)
    )
    head_dim = HEAD_DIM * (2 if wide else 1)
    head_dim = small.put("model.head_dim", head_dim, before=arch.dims_per_head)
    beside = 0 if arch.hidden_size == arch.num_attention_heads * arch.dims_per_head else 8
    small.put("model.hidden_size", heads * head_dim + beside)


def _ropes(arch: Architecture) -> list[RopeConfig]:
    return [arch.rope, *([arch.rope_sliding] if arch.rope_sliding else [])]


def _shrink_positions(small: Small, arch: Architecture, tokens: int) -> None:
    """Windows shorter than documents. Positions cost only where they are learned, and matter where documents are long.

    LongRoPE turns documents above a length by other factors: that length is made small in proportion.
    """
    if arch.sliding_window is not None:
        small.put("model.sliding_window", max(2, tokens // 6))
    by_length = any(rope.scaling is not None and rope.scaling.type == "longrope" for rope in _ropes(arch))
    if arch.position_embedding == "rope" and not by_length:
        if arch.max_position_embeddings < 2 * tokens:
            small.fix("model.max_position_embeddings", 2 * tokens, before=arch.max_position_embeddings)
        return
    positions = small.put("model.max_position_embeddings", 2 * tokens, before=arch.max_position_embeddings)
    for name in ("rope", "rope_sliding"):
        scaling = small.get(f"model.{name}.scaling")
        if scaling is None:
            continue
        key = f"model.{name}.scaling"
        original = scaling.get("original_max_position_embeddings")
        if original is not None:
            share = original / arch.max_position_embeddings
            small.put(f"{key}.original_max_position_embeddings", max(1, math.ceil(positions * share)))
        turned = int(small.get("model.head_dim", HEAD_DIM) * small.get(f"model.{name}.percent", 1.0)) // 2
        for factors in ("short_factor", "long_factor"):
            if scaling.get(factors) is not None:
                small.put(f"{key}.{factors}", scaling[factors][:turned])


def _shrink_adapter(small: Small, arch: Architecture, layers: list[int]) -> None:
    adapter = small.get("adapter")
    if adapter is None:
        return
    rank, alpha = adapter.get("rank", 16), adapter.get("alpha", 32)
    fewer = small.put("adapter.rank", min(rank, 4), before=rank)
    power = 0.5 if adapter.get("use_rslora") else 1.0
    if fewer != rank:
        small.put("adapter.alpha", alpha * (fewer / rank) ** power, before=alpha, why="the same scale")
    if adapter.get("layers") is not None:
        chosen = [place for place, layer in enumerate(layers) if layer in adapter["layers"]]
        small.put("adapter.layers", chosen or [len(layers) - 1])
