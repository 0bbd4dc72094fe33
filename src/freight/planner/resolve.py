"""From a configuration to the plan it means: sizes, steps, kernels and groups, with the arithmetic in words.

Every check that needs more than a look at the keys stands here: those that need the architecture, the device or the
data. `check`, `pack` and `train` print the same words, because they come from the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple

import torch

from freight.config.adapter_targets import AdapterTargets
from freight.config.architecture import Architecture
from freight.config.checks import faults, fit_faults, schedule_faults
from freight.config.data_checks import pack_size
from freight.config.model_checks import architecture_faults
from freight.config.schema import AdapterConfig, Config
from freight.data.pack.batch_size import rows_for_documents
from freight.data.pack.rows import IndexedRows
from freight.errors import ConfigError
from freight.nn.decoder import Decoder
from freight.ops.attention_backends import (
    Choice,
    Hardware,
    Request,
    choose_backend,
    missing_backends,
)
from freight.ops.attention_mask import MaskKind
from freight.planner.execution import DTYPES, ExecutionPlan, resolve_execution
from freight.planner.words import plan_words


class DataFacts(NamedTuple):
    """What packing knows of the training data.

    Args:
        num_documents: Documents of an epoch.
        num_rows: Rows of an epoch.
        num_tokens: Real tokens of an epoch.
        max_length: Longest document, in tokens.
        pack_size: Tokens of a row, when a packed file decides it.
        algorithm: How the rows were packed.
        mixture: The shares of sources with weights, in words.
        epoch_rows: Rows of each epoch of the run, where they were counted; packed anew, they differ by a few.
    """

    num_documents: int
    num_rows: int
    num_tokens: int
    max_length: int
    pack_size: int | None = None
    algorithm: str | None = None
    mixture: tuple[str, ...] = ()
    epoch_rows: tuple[int, ...] = ()

    def rows_in(self, epoch: int) -> int:
        """Rows of an epoch; of the first, where no more is known."""
        return self.epoch_rows[epoch] if epoch < len(self.epoch_rows) else self.num_rows

    @property
    def packing_factor(self) -> float:
        """Documents per row, n."""
        return self.num_documents / self.num_rows


class Group(NamedTuple):
    """Parameters that are treated alike."""

    tensors: int
    parameters: int


@dataclass(frozen=True)
class Plan:
    """What a configuration means on a number of ranks.

    Args:
        config: The configuration.
        arch: The architecture.
        execution: How microbatches are dealt out to ranks, and how blocks are run.
        pack_size: Tokens of a row.
        micro_batch_tokens: Tokens of a microbatch, over the context ranks that share it.
        rows_per_step: Rows of an optimizer step over all ranks; None while documents per step need the data.
        total_steps: Optimizer steps; None while epochs need the data.
        decaying: Trained weights under weight decay.
        not_decaying: Trained norms, biases and lengths.
        frozen: What an adapter leaves as it is.
        attention: Kernels of the longest document alone.
        packed_attention: Kernels of a row of several documents.
        hardware: Of the device that computes.
        data: What is known of the data.
        adapted: Modules of the adapter; None without one.
    """

    config: Config
    arch: Architecture
    execution: ExecutionPlan
    pack_size: int
    micro_batch_tokens: int
    rows_per_step: int | None
    total_steps: int | None
    decaying: Group
    not_decaying: Group
    frozen: Group
    attention: Choice
    packed_attention: Choice
    hardware: Hardware
    data: DataFacts | None
    adapted: AdapterTargets | None = None

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of context ranks, that work on different microbatches."""
        return self.execution.data_ranks

    @property
    def rows_per_microbatch(self) -> int:
        """Rows of a microbatch."""
        return self.micro_batch_tokens // self.pack_size

    @property
    def microbatches_per_step(self) -> int | None:
        """Microbatches that each data rank accumulates."""
        if self.rows_per_step is None:
            return None
        return math.ceil(self.rows_per_step / (self.rows_per_microbatch * self.data_ranks))

    @property
    def filler_rows(self) -> int:
        """Rows without labels that complete the last microbatches of a step."""
        if self.rows_per_step is None or self.microbatches_per_step is None:
            return 0
        return self.microbatches_per_step * self.rows_per_microbatch * self.data_ranks - self.rows_per_step

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of a step, padding inside rows included, fillers not."""
        return None if self.rows_per_step is None else self.rows_per_step * self.pack_size

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch, once the data is known."""
        if self.data is None or self.rows_per_step is None:
            return None
        whole, tail = divmod(self.data.num_rows, self.rows_per_step)
        return whole + (tail > 0 and not self.config.data.drop_last)

    def words(self) -> list[str]:
        """The plan, one sentence a line."""
        return plan_words(self)


def resolve(
    config: Config,
    arch: Architecture,
    *,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    data: DataFacts | None = None,
    hardware: Hardware = Hardware("cpu"),  # noqa: B008 - an immutable tuple
    device_bytes: int | None = None,
    adapted: AdapterTargets | None = None,
) -> Plan:
    """Work out what a configuration means.

    Args:
        config: From `load_config`.
        arch: From `architecture_of`.
        world_size: Processes; None = as many as the configuration needs.
        ranks_per_node: Processes that share a node; None = all.
        data: Facts of the packed data, where it is at hand.
        hardware: Of the device that computes.
        device_bytes: Its memory; None = not known.
        adapted: Modules that `adapter` means in this architecture.

    Raises:
        ConfigError: All faults.
    """
    assert (adapted is None) == (config.adapter is None)
    found = [*faults(config), *architecture_faults(arch), *fit_faults(config, arch)]
    attention: tuple[Choice, Choice] | None = None
    if not found:
        try:
            longest = data.max_length if data else None
            attention = (
                _kernels(config, arch, hardware, longest, packed=False),
                _kernels(config, arch, hardware, longest, packed=True),
            )
        except ConfigError as error:
            found += error.faults
    rows = None if found else _rows_per_step(config, data)
    row = (data.pack_size if data else None) or pack_size(config.data)
    execution: ExecutionPlan | None = None
    if not found:
        try:
            execution = resolve_execution(
                config,
                arch,
                config.train.micro_batch_tokens or row,
                world_size=world_size,
                ranks_per_node=ranks_per_node,
                device_bytes=device_bytes,
            )
        except ConfigError as error:
            found += error.faults
    steps = _total_steps(config, data, rows)
    if data is not None and steps is not None and not found:
        found += schedule_faults(config.train.schedule, steps) if config.train.steps is None else ()
        found += _data_faults(config, arch, data, rows)
    if found or attention is None or execution is None:
        raise ConfigError(*dict.fromkeys(found))
    decaying, not_decaying, frozen = _groups(arch, config.adapter, adapted)
    return Plan(
        config=config,
        arch=arch,
        execution=execution,
        pack_size=row,
        micro_batch_tokens=config.train.micro_batch_tokens or row,
        rows_per_step=rows,
        total_steps=steps,
        decaying=decaying,
        not_decaying=not_decaying,
        frozen=frozen,
        adapted=adapted,
        attention=attention[0],
        packed_attention=attention[1],
        hardware=hardware,
        data=data,
    )


def _kernels(config: Config, arch: Architecture, hardware: Hardware, longest: int | None, *, packed: bool) -> Choice:
    """The kernels of one document of the full length, or of several documents in a row."""
    length = config.data.sequence_length or longest or pack_size(config.data)
    request = Request(
        dtype=DTYPES[config.train.precision],
        head_dim=arch.dims_per_head,
        num_heads=arch.num_attention_heads,
        num_query_groups=arch.groups,
        tokens_q=length,
        tokens_k=length,
        kind=MaskKind.DOCUMENTS if packed else MaskKind.CAUSAL,
        equal_lengths=not packed,
        softcap=arch.attention_softcap,
        dropout=arch.attention_dropout,
        deterministic=config.attention.deterministic,
    )
    disabled = {*config.attention.disable, *missing_backends()}
    return choose_backend(hardware, request, backend=config.attention.backend, disabled=disabled)


def _rows_per_step(config: Config, data: DataFacts | None) -> int | None:
    train = config.train
    if train.global_batch_size is not None:
        return train.global_batch_size
    if train.global_batch_tokens is not None:
        return train.global_batch_tokens // ((data.pack_size if data else None) or pack_size(config.data))
    assert train.global_batch_documents is not None
    if data is not None:
        return rows_for_documents(train.global_batch_documents, data.packing_factor)
    return train.global_batch_documents if config.data.packing is None and config.data.format != "packed" else None


def _total_steps(config: Config, data: DataFacts | None, rows: int | None) -> int | None:
    train = config.train
    if train.steps is not None:
        return train.steps
    if data is None or rows is None or train.epochs is None:
        return None
    steps = 0
    for epoch in range(math.ceil(train.epochs)):
        whole, tail = divmod(math.ceil(data.rows_in(epoch) * min(1.0, train.epochs - epoch)), rows)
        steps += whole + (tail > 0 and not config.data.drop_last)
    return steps


def _data_faults(config: Config, arch: Architecture, data: DataFacts, rows: int | None) -> Iterator[str]:
    if data.max_length > arch.max_position_embeddings:
        yield (
            f"the longest document has {data.max_length:,} tokens, the model {arch.max_position_embeddings:,} "
            "positions. Pack with a shorter `data.sequence_length`, or stretch the positions with "
            "`model.max_position_embeddings` and `model.rope.scaling`."
        )
    if config.data.drop_last and rows is not None and data.num_rows < rows:
        yield (
            f"0 steps per epoch: {data.num_rows:,} rows, global batch {rows:,} and `data.drop_last`. Lower the global "
            "batch or set data.drop_last=false."
        )
    if data.pack_size is not None:
        for key in ("micro_batch_tokens", "global_batch_tokens"):
            tokens = getattr(config.train, key)
            if tokens is not None and tokens % data.pack_size:
                below = tokens - tokens % data.pack_size
                near = f"{below} or {below + data.pack_size}" if below else f"{data.pack_size}"
                yield (
                    f"`train.{key}` must be a multiple of the packed file's pack_size {data.pack_size}; got {tokens}. "
                    f"Use {near}."
                )


def _groups(
    arch: Architecture, adapter: AdapterConfig | None, adapted: AdapterTargets | None
) -> tuple[Group, Group, Group]:
    """Trained weights of two or more dims, which decay; other trained ones; frozen ones."""
    with torch.device("meta"):
        parameters = {name: parameter.shape for name, parameter in Decoder(arch).named_parameters()}
    trained, frozen = list(parameters.values()), []
    if adapter is not None and adapted is not None:
        full = {name for name in parameters if name.rpartition(".")[0] in adapted.full}
        trained = [parameters[name] for name in full]
        frozen = [shape for name, shape in parameters.items() if name not in full]
        for module in adapted.lora:
            rows, columns = parameters[f"{module}.weight"]
            trained += [torch.Size((adapter.rank, columns)), torch.Size((rows, adapter.rank))]
            trained += [torch.Size((rows,))] * adapter.use_dora
    return (
        _group(shape for shape in trained if len(shape) >= 2),
        _group(shape for shape in trained if len(shape) < 2),
        _group(frozen),
    )


def _group(shapes: Iterable[torch.Size]) -> Group:
    sizes = [shape.numel() for shape in shapes]
    return Group(len(sizes), sum(sizes))


def data_facts(rows: IndexedRows, epochs: float | None = None) -> DataFacts:
    """Facts of rows whose number is known.

    Args:
        rows: The rows.
        epochs: Passes over them; every one is packed to count its rows. None = only the first.
    """
    counted = range(math.ceil(epochs or 1))
    return DataFacts(
        rows.num_documents,
        rows.num_rows,
        rows.num_tokens,
        rows.max_length,
        rows.pack_size,
        rows.packing["algorithm"],
        tuple(map(str, rows.mixture)),
        tuple(sum(takewhile(bool, (rows.rows_in(epoch, window) for window in count()))) for epoch in counted),
    )
