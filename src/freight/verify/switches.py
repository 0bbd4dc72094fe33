"""What of a small run can be switched off, one at a time: for claims of bitwise equality, and for finding a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from freight.errors import ConfigError
from freight.verify.case import Case

Raw = dict[str, Any]
Switch = Callable[[Raw], bool]  # changes a configuration; whether there was anything to change


def _take(raw: Raw, *path: str) -> bool:
    *parents, last = path
    node: Any = raw
    for part in parents:
        node = node.get(part)
        if node is None:
            return False
    return node.pop(last, None) is not None


def _overlap(raw: Raw) -> bool:
    if raw.get("parallel", {}).get("context", 1) == 1 or raw.get("overlap", {}).get("context") is False:
        return False
    raw.setdefault("overlap", {})["context"] = False
    return True


def _tier(raw: Raw) -> bool:
    """Everything on the device; keys and values that are streamed from a tier come from the other one."""
    fpdt = raw.get("fpdt")
    if fpdt is None:
        return raw.get("offload", {}).get("layer_inputs", "none") != "none" and _take(raw, "offload")
    tier = fpdt.get("offload", "none")
    if tier == "none" or (tier == "host" and fpdt.get("kv") == "offload"):
        return False
    fpdt["offload"] = "host" if fpdt.get("kv") == "offload" else "none"
    _take(raw, "offload")
    return True


def _recompute(raw: Raw) -> bool:
    return _take(raw, "recompute") and (_take(raw, "offload") or True)


def _ffn_chunks(raw: Raw) -> bool:
    return _null(raw, "ffn_chunk_tokens")


def _loss_chunks(raw: Raw) -> bool:
    return _null(raw, "loss_chunk_tokens")


def _null(raw: Raw, key: str) -> bool:
    fpdt = raw.get("fpdt")
    if fpdt is None or fpdt.get(key) in (None, fpdt.get("chunk_tokens")):
        return False
    fpdt[key] = None
    return True


def _fpdt(raw: Raw) -> bool:
    return _take(raw, "fpdt") and (_take(raw, "offload") or True)


def _context(raw: Raw) -> bool:
    ranks = raw.get("parallel", {}).get("context", 1)
    for key in ("context", "context_method", "ulysses"):
        _take(raw, "parallel", key)
    _take(raw, "overlap")
    return ranks > 1


def _data(raw: Raw) -> bool:
    ranks = raw.get("parallel", {}).get("data_shard", 1)
    _take(raw, "parallel", "data_shard")
    return ranks > 1


def _dropout(raw: Raw) -> bool:
    return any([_take(raw, "adapter", "dropout"), _take(raw, "model", "attention_dropout")])


def _adapter(raw: Raw) -> bool:
    return _take(raw, "adapter")


def _accumulation(raw: Raw) -> bool:
    """One microbatch a data rank."""
    train = raw["train"]
    rows = (train.get("micro_batch_tokens") or 0) // _row(raw) or 1
    least = rows * raw.get("parallel", {}).get("data_shard", 1)
    changed = train["global_batch_size"] > least
    train["global_batch_size"] = least
    return changed


def _packing(raw: Raw) -> bool:
    row = _row(raw)
    if not _take(raw, "data", "packing"):
        return False
    raw["data"]["sequence_length"] = row
    return True


def _row(raw: Raw) -> int:
    return (raw["data"].get("packing") or {}).get("pack_size") or raw["data"]["sequence_length"]


def _clipping(raw: Raw) -> bool:
    changed = raw["train"].get("grad_clip", 1.0) is not None
    raw["train"]["grad_clip"] = None
    return changed


# In the order in which they are tried when something differs: first what lies on top of other switches.
SWITCHES: dict[str, Switch] = {
    "overlap.context": _overlap,
    "offload": _tier,
    "recompute": _recompute,
    "fpdt.ffn_chunk_tokens": _ffn_chunks,
    "fpdt.loss_chunk_tokens": _loss_chunks,
    "fpdt": _fpdt,
    "parallel.context": _context,
    "parallel.data_shard": _data,
    "dropout": _dropout,
    "adapter": _adapter,
    "train.grad_clip": _clipping,
    "accumulation": _accumulation,
    "data.packing": _packing,
}
# Switches that the design says change no bit.
EXACT = {
    "overlap.context": "overlap.context off: the same bits",
    "offload": "another tier: the same bits",
    "recompute": "recompute off: the same bits",
}


def without(case: Case, *names: str) -> Case | None:
    """The run with some switches off; None if none of them is on, or the rest cannot be without them."""
    raw = case.raw()
    if not [name for name in names if SWITCHES[name](raw)]:
        return None
    try:
        return case.changed(raw)
    except ConfigError:
        return None
