"""Foreign keys that become ours only with others: sizes per device or rank, an absolute least learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from freight.config.keys import shown

Notice = Callable[[str], None]


def batch_sizes(raw: dict[str, Any], world_size: int, notice: Notice) -> list[str]:
    """Turn sequences per device and accumulation into rows and tokens, in place, with the arithmetic as a notice."""
    train, data = raw.get("train"), raw.get("data")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if not isinstance(train, dict) or not any(name in train for name in names):
        return []
    sequences, accumulation = (train.pop(name, None) for name in names)
    faults = [
        f"`{name}` must be an integer of at least 1; got {shown(value)}."
        for name, value in zip(names, (sequences, accumulation), strict=True)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]
    packing = data.get("packing") if isinstance(data, dict) else None
    row = packing.get("pack_size") if isinstance(packing, dict) else None
    row = row or (data.get("sequence_length") if isinstance(data, dict) else None)
    if faults or not isinstance(row, int):
        return faults
    given = train.get("global_batch_size")
    if sequences is None and isinstance(given, int) and given % (accumulation * world_size) == 0:
        sequences = given // (accumulation * world_size)
    tokens = (sequences or 1) * row
    faults += _settle(train, "micro_batch_tokens", tokens, "per_device_train_batch_size", sequences is not None)
    arithmetic = f"{sequences or 1} sequences x {row} tokens = `train.micro_batch_tokens` {tokens}"
    other_unit = any(train.get(key) is not None for key in ("global_batch_documents", "global_batch_tokens"))
    if accumulation is not None or (given is None and not other_unit):
        rows = (sequences or 1) * (accumulation or 1) * world_size
        arithmetic += (
            f"; {sequences or 1} x {accumulation or 1} accumulation steps x {world_size} device"
            f"{'s' * (world_size > 1)} = `train.global_batch_size` {rows} rows"
        )
        faults += _settle(train, "global_batch_size", rows, "gradient_accumulation_steps", True)
    if not faults:
        notice(f"{arithmetic}.")
    return faults


def min_lr(raw: dict[str, Any], notice: Notice) -> list[str]:
    """Turn NeMo's absolute `min_lr` into a share of the learning rate, in place."""
    train = raw.get("train")
    if not isinstance(train, dict) or "min_lr" not in train:
        return []
    least = train.pop("min_lr")
    optimizer, schedule = train.get("optimizer"), train.setdefault("schedule", {})
    peak = optimizer.get("lr") if isinstance(optimizer, dict) else None
    numbers = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in (least, peak)]
    if not all(numbers) or not isinstance(schedule, dict) or not 0 <= least <= peak:
        return [f"`min_lr` must lie between 0 and the learning rate {shown(peak)}; got {shown(least)}. Remove it."]
    faults = _settle(schedule, "min_lr_ratio", least / peak, "min_lr", True)
    if not faults:
        notice(f"`min_lr` {least:g} / lr {peak:g} = `train.schedule.min_lr_ratio: {least / peak:g}`.")
    return faults


def context_method(raw: dict[str, Any], notice: Notice) -> list[str]:
    """Take Megatron's way of communication for several context ranks; for one it means nothing."""
    parallel = raw.get("parallel")
    if not isinstance(parallel, dict) or "cp_comm_type" not in parallel:
        return []
    method = parallel.pop("cp_comm_type")
    if parallel.get("context", 1) == 1:
        notice("`cp_comm_type` is dropped: `parallel.context` is 1.")
        return []
    faults = _settle(parallel, "context_method", method, "cp_comm_type", True, "parallel")
    if not faults:
        notice(f"`cp_comm_type` is read as `parallel.context_method: {shown(method)}`.")
    return faults


def ffn_chunk(raw: dict[str, Any], notice: Notice) -> list[str]:
    """Turn the tokens of one rank in a feed-forward chunk, as DeepSpeed counts them, into those of all ranks."""
    fpdt, parallel = raw.get("fpdt"), raw.get("parallel")
    if not isinstance(fpdt, dict) or "ffn_chunk_tokens_of_rank" not in fpdt:
        return []
    tokens = fpdt.pop("ffn_chunk_tokens_of_rank")
    context = parallel.get("context", 1) if isinstance(parallel, dict) else 1
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in (tokens, context)):
        return [f"`fpdt_FFN_chunk_size` must be an integer of at least 1; got {shown(tokens)}. Remove it."]
    faults = _settle(fpdt, "ffn_chunk_tokens", tokens * context, "fpdt_FFN_chunk_size", True, "fpdt")
    if not faults:
        notice(
            f"`fpdt_FFN_chunk_size` {tokens} tokens of a rank x `parallel.context` {context} = "
            f"`fpdt.ffn_chunk_tokens: {tokens * context}`."
        )
    return faults


def _settle(section: dict[str, Any], key: str, value: Any, source: str, wanted: bool, name: str = "train") -> list[str]:
    if not wanted:
        return []
    present = section.setdefault(key, value)
    if present in (None, value):
        section[key] = value
        return []
    return [f"`{source}` gives `{name}.{key}` {value}, but it is written as {shown(present)}. Keep one of the two."]
