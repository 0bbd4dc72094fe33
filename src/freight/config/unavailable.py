"""Keys of Freight that other versions have and this one does not: refused by name, so that nobody thinks they work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Path of a key -> what it is about.
SECTIONS: Mapping[str, str] = {
    "parallel.tensor": "tensor parallelism",
    "parallel.sequence": "sequence parallelism",
    "parallel.pipeline": "pipeline parallelism",
    "parallel.virtual_pipeline": "pipeline parallelism",
    "parallel.pipeline_schedule": "pipeline parallelism",
    "parallel.pipeline_layers": "pipeline parallelism",
    "parallel.expert": "expert parallelism",
    "parallel.data_replicate": "replicated data parallelism",
    "parallel.zero_stage": "the choice of a ZeRO stage",
    "parallel.grad_accumulation": "sharded accumulation of gradients",
    "recompute.modules": "selective recomputation",
    "recompute.partial_microbatches": "partial recomputation",
    "recompute.budget_bytes": "recomputation by budget",
    "offload.optimizer": "offload of the optimizer",
    "overlap.grad_reduce": "overlap of gradient sums",
    "overlap.param_gather": "overlap of parameter gathers",
    "overlap.prefetch_blocks": "overlap of parameter gathers",
    "overlap.chunk_bytes": "overlap of gradient sums",
    "overlap.grad_reduce_dtype": "bf16 gradient sums",
    "overlap.fp8_param_gather": "fp8 parameter gathers",
    "overlap.tensor": "tensor parallelism",
    "overlap.p2p": "pipeline parallelism",
    "overlap.batch_p2p": "pipeline parallelism",
    "overlap.ulysses_groups": "a choice of head portions",
    "memory": "the memory planner",
    "model.moe": "mixture of experts",
    "train.fp8": "fp8",
}
# Methods that put virtual tokens in front: in a packed row they would reach its first document only.
VIRTUAL_TOKENS = ("prefix_tuning", "prompt_tuning", "multitask_prompt_tuning", "p_tuning", "ptuning")
VALUES: Mapping[str, tuple[str, ...]] = {
    "train.precision": ("fp8",),
    "recompute.granularity": ("selective",),
    "recompute.method": ("block",),
}

WHOLE_SECTIONS = ("recompute.granularity",)


def take_out(raw: dict[str, Any]) -> Iterator[str]:
    """Remove such keys from a raw configuration, giving one fault for each."""
    for key, topic in SECTIONS.items():
        *parents, last = key.split(".")
        section = _section(raw, parents)
        if section is not None and last in section:
            del section[last]
            yield f"`{key}` ({topic}) is not available in this version of Freight; remove it."
    adapter = _section(raw, ["adapter"])
    if adapter is not None and str(adapter.get("type")).lower().replace("-", "_") in VIRTUAL_TOKENS:
        yield (
            f"`adapter.type` {adapter.pop('type')} puts virtual tokens in front of a row, and a packed row holds "
            "several documents. Use lora."
        )
    for key, values in VALUES.items():
        *parents, last = key.split(".")
        section = _section(raw, parents)
        if section is not None and isinstance(section.get(last), str) and section[last] in values:
            yield f"`{key}: {section.pop(last)}` is not available in this version of Freight; remove it."
            if key in WHOLE_SECTIONS:
                del raw[parents[0]]  # without the key it would only be called incomplete


def covers(path: tuple[str | int, ...]) -> bool:
    """Whether a path lies in such a section."""
    return any(path[: len(key.split("."))] == tuple(key.split(".")) for key in SECTIONS)


def _section(raw: Mapping[str, Any], parents: list[str]) -> dict[str, Any] | None:
    section: Any = raw
    for part in parents:
        section = section.get(part) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else None
