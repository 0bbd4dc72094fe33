"""From a configuration to everything a run needs, in the order that finds faults before anything is written.

First what is cheap and can be wrong (architecture, weights' names and shapes, tokenizer, data, plan), then the run
folder, then what takes memory (model, optimizer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from freight.assemble.adapters import targets_for
from freight.assemble.build import architecture_for, build_model, weights_for
from freight.assemble.execution import Execution, build_execution
from freight.config.architecture import Architecture
from freight.config.checks import fit_faults
from freight.config.model_checks import architecture_faults
from freight.config.schema import Config
from freight.data.load.build import Which, open_rows
from freight.data.load.loader import StepLoader
from freight.data.pack.rows import IndexedRows, RowSource
from freight.data.render.tokenizer import load_tokenizer
from freight.errors import ConfigError
from freight.nn.decoder import Decoder
from freight.ops.attention_backends import hardware_of
from freight.parallel.mesh import build_mesh
from freight.planner.execution import world_faults
from freight.planner.plan import Plan
from freight.planner.resolve import data_facts, resolve
from freight.planner.tier_space import tier_faults
from freight.train.launch import World, device_bytes, free_host_bytes
from freight.train.optimizer import build_optimizer
from freight.train.schedule import phases

ProgressCallback = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Prepared:
    """Inputs of a run, all read and checked; no model yet.

    Args:
        config: As resolved.
        arch: The model's architecture.
        rows: Training rows.
        validation: Held-out rows.
        plan: Sizes and steps.
        total_steps: Steps of the whole run.
        data_rank: Number of this rank among those with microbatches of their own.
    """

    config: Config
    arch: Architecture
    rows: RowSource
    validation: IndexedRows | None
    plan: Plan
    total_steps: int
    data_rank: int = 0

    def loader(self) -> StepLoader:
        """A loader at the beginning of the data."""
        return build_loader(self.config, self.rows, self.plan, self.data_rank)


def prepare(config: Config, world: World, run_dir: Path, progress: ProgressCallback | None = None) -> Prepared:
    """Read and check everything but the weights' contents.

    Args:
        config: Checked by itself.
        world: Where this process computes.
        run_dir: Where rejected records go; written only if there are any.
        progress: For tokenising and packing.

    Raises:
        FreightError: Anything that cannot be used.
    """
    arch = architecture_for(config)
    faults = [*architecture_faults(arch), *fit_faults(config, arch), *world_faults(config, world.size)]
    if faults:
        raise ConfigError(*faults)
    weights_for(config, arch)
    adapted = targets_for(config, arch)
    context = config.parallel.context
    data_rank, data_ranks = world.rank // context, world.size // context
    rejects = run_dir if world.first or config.data.streaming else None
    rows_of = row_opener(config, arch, rejects, progress, data_ranks=data_ranks, rank=data_rank)
    rows = rows_of("train")
    validation = rows_of("validation").indexed() if config.data.validation is not None else None
    indexed = rows.indexed()
    facts = None if indexed is None else data_facts(indexed, config.train.epochs)
    plan = resolve(
        config,
        arch,
        world_size=world.size,
        ranks_per_node=world.ranks_per_node,
        data=facts,
        hardware=hardware_of(world.device),
        device_bytes=device_bytes(world.device),
        adapted=adapted,
    )
    faults = list(
        tier_faults(plan.execution, config, arch, ranks_per_node=world.ranks_per_node, host_bytes=free_host_bytes())
    )
    if faults:
        raise ConfigError(*faults)
    total_steps = build_loader(config, rows, plan, data_rank).total_steps
    phases(total_steps, config.train.schedule)
    return Prepared(config, arch, rows, validation, plan, total_steps, data_rank)


def row_opener(
    config: Config,
    arch: Architecture,
    rejects_dir: Path | None,
    progress: ProgressCallback | None,
    *,
    data_ranks: int = 1,
    rank: int = 0,
) -> Callable[[Which], RowSource]:
    """What opens the training or the validation rows of a run, for which the tokenizer is loaded once.

    Args:
        config: Of the run.
        arch: Of its model.
        rejects_dir: Where rejected records go; None = nowhere.
        progress: For tokenising and packing.
        data_ranks: Ranks that read different rows.
        rank: This one.
    """
    place = config.data.tokenizer or config.model.hf
    tokenizer = None if place is None else load_tokenizer(place)

    def rows_of(which: Which) -> RowSource:
        return open_rows(
            config.data,
            config.train.seed,
            which,
            tokenizer,
            vocab_size=arch.vocab_size,
            rejects_dir=rejects_dir,
            progress=progress,
            data_ranks=data_ranks,
            rank=rank,
        )

    return rows_of


def build_loader(config: Config, rows: RowSource, plan: Plan, data_rank: int = 0) -> StepLoader:
    """The training loader of a plan, for one of its data ranks."""
    return StepLoader(
        rows,
        rows_per_step=plan.rows_per_step or 1,
        micro_batch_tokens=plan.micro_batch_tokens,
        seed=config.train.seed,
        drop_last=config.data.drop_last,
        data_ranks=plan.data_ranks,
        rank=data_rank,
        num_workers=config.data.num_workers,
        prefetch_batches=config.data.prefetch_batches,
        epochs=config.train.epochs,
        steps=config.train.steps,
        pad_rows=config.data.packing is None or config.data.packing.pad_rows,
    )


@dataclass(frozen=True)
class Trainable:
    """What takes memory.

    Args:
        model: Wrapped for the mesh.
        optimizer: With its state.
        mesh: Of all ranks.
        device: Where the model computes.
        execution: How this rank runs the model.
    """

    model: Decoder
    optimizer: AdamW
    mesh: DeviceMesh
    device: torch.device
    execution: Execution


@contextmanager
def build(prepared: Prepared, world: World) -> Iterator[Trainable]:
    """Model and optimizer on this rank; what the run keeps on a tier is given back at the end.

    Raises:
        OffloadError: The tier has no room.
    """
    config, arch, plan = prepared.config, prepared.arch, prepared.plan.execution
    mesh = build_mesh(world.size, world.device.type, context=plan.context_ranks)
    with build_execution(plan, config, arch, mesh, world.device) as execution:
        model = build_model(arch, config, mesh, execution=execution, weights=weights_for(config, arch))
        optimizer = build_optimizer(model, config.train.optimizer)
        yield Trainable(model, optimizer, mesh, world.device, execution)
