"""From a configuration to the plan it means: sizes, steps, kernels and groups.

Checks that need more than a look at the keys stand here and in `execution.py`: those that need the architecture, the
device or the data. `check`, `pack` and `train` say the same of a run, because it comes from the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import count, takewhile

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
from freight.planner.plan import DataFacts, Group, Plan


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
