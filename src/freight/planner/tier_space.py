"""Whether a machine has room for what a run keeps in host memory or on disk, asked before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from freight.config.architecture import Architecture
from freight.config.schema import Config
from freight.planner.execution import ExecutionPlan, resolve_execution


def tier_faults(
    plan: ExecutionPlan, config: Config, arch: Architecture, *, ranks_per_node: int, host_bytes: int | None
) -> Iterator[str]:
    """What is missing, with the smaller choices that would fit.

    Args:
        plan: Of the run.
        config: Of the run.
        arch: Its model.
        ranks_per_node: Processes on this machine.
        host_bytes: Memory of this machine that is free; None = not known.
    """
    if plan.tier == "disk":
        yield from _disk(plan, config, arch, ranks_per_node)
    if plan.tier == "host" and host_bytes is not None and plan.tier_bytes * ranks_per_node > host_bytes:
        ranks = f"{ranks_per_node} ranks x {amount(plan.tier_bytes)} = " if ranks_per_node > 1 else ""
        key = "fpdt.offload" if plan.stream is not None else "offload.layer_inputs"
        yield (
            f"Host memory: {ranks}{amount(plan.tier_bytes * ranks_per_node)} are needed; {amount(host_bytes)} are "
            f"available. Use `{key}: disk`{_less(plan, config, arch, ranks_per_node)}, or more `parallel.context` "
            "ranks."
        )


def _disk(plan: ExecutionPlan, config: Config, arch: Architecture, ranks_per_node: int) -> Iterator[str]:
    directory = Path(config.offload.directory or "").expanduser()
    if not directory.is_dir():
        yield f"`offload.directory` {directory} is no folder. Make it, on a local disk, or name another."
        return
    if not os.access(directory, os.W_OK | os.X_OK):
        yield f"`offload.directory` {directory} cannot be written to. Change its permissions, or name another."
        return
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free < plan.tier_bytes * ranks_per_node:
        ranks = f" per rank, {ranks_per_node} ranks here" if ranks_per_node > 1 else ""
        yield (
            f"`offload.directory` {directory} has {amount(free)} free; this run writes {amount(plan.tier_bytes)}"
            f"{ranks}. Free space{_less(plan, config, arch, ranks_per_node)}."
        )


def _less(plan: ExecutionPlan, config: Config, arch: Architecture, ranks_per_node: int) -> str:
    """`, or set ...` with what a smaller choice would take; nothing if there is none."""
    if config.fpdt is None or plan.stream is None or plan.stream.save_attention == "none":
        return ""
    fpdt = config.fpdt.model_copy(update={"save_attention": "none", "kv": plan.stream.kv})
    smaller = resolve_execution(
        config.model_copy(update={"fpdt": fpdt}),
        arch,
        plan.tokens,
        world_size=plan.world_size,
        ranks_per_node=ranks_per_node,
    )
    return f", or set `fpdt.save_attention: none` ({amount(smaller.tier_bytes)})"


def amount(count: int) -> str:
    """`1.5 GiB`, `700 MiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
