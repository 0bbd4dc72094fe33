"""From a configuration to a small one of the same kind: every switch stays, every size that only costs becomes small.

A proof of the small run is one of the schedule: which rank holds what, in which order things are added, kept, sent and
brought back. What decides these (ratios of heads, chunks and their tail, windows, documents of uneven lengths, two
steps of accumulation) is kept in kind; how wide a matrix is does not matter for them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from freight.config.architecture import Architecture
from freight.config.data_checks import algorithm, known_pack_size
from freight.config.keys import Path, annotation_at, fields_of, known, section_in
from freight.config.load import config_from
from freight.config.messages import did_you_mean
from freight.config.model import architecture_of
from freight.config.schema import Config
from freight.errors import ConfigError, FreightError
from freight.planner.execution import ExecutionPlan
from freight.verify.case import STEPS, Case, Dtype, small_documents
from freight.verify.shrink_model import shrink_model
from freight.verify.small import Change, Small

MOST_RANKS = 8
OTHER_BATCH_SIZES = ("global_batch_documents", "global_batch_tokens")
# Where a gradient is rounding alone, AdamW makes a step of it that is rounding / eps.
LEAST_EPS: Mapping[Dtype, float] = {"fp64": 1e-5, "fp32": 1e-3, "bf16": 1e-1}
MOST_PARAMETERS = 20_000_000
MOST_PAIRS = 64_000_000  # numbers of one layer's scores in the reference


class ShrinkError(FreightError):
    """What is asked for is too large for a proof on this machine."""


@dataclass(frozen=True)
class Shrunk:
    """What is verified in place of a configuration.

    Args:
        case: The small run.
        changes: From the configuration to it.
    """

    case: Case
    changes: tuple[Change, ...]


def shrink(
    config: Config,
    arch: Architecture,
    plan: ExecutionPlan,
    *,
    keep: Collection[str] = (),
    full_mesh: bool = False,
    directory: str | None = None,
    dtype: Dtype = "fp64",
    device: str = "cpu",
) -> Shrunk:
    """Make a small run of the same kind.

    Args:
        config: Checked.
        arch: What its model means.
        plan: Its ranks and chunks, with `auto` resolved.
        keep: Dotted keys that keep their values.
        full_mesh: Axes keep their sizes.
        directory: For a disk tier.
        dtype: Of the ranks' arithmetic.
        device: Of the ranks.

    Raises:
        ConfigError: A key to keep does not exist.
        ShrinkError: The small run would still be too large, or what is kept does not fit it.
    """
    _check_keys(keep)
    if device == "cuda":  # its kernels are what is to be seen
        keep = {*keep, "model.head_dim"}
    small = Small(config.model_dump(mode="json", by_alias=True, exclude_unset=True), frozenset(keep))
    data, context, row = _shrink_mesh(small, plan, full_mesh, device)
    tokens = _shrink_lengths(small, config, plan, context)
    shrink_model(small, arch, tokens, (context, row), plan)
    _shrink_data(small, config, plan, data, tokens)
    _shrink_training(small, config, dtype)
    if device == "cpu":
        _replace_kernels(small)
    if small.get("offload.directory") is not None:
        small.fix("offload.directory", directory, why="a temporary folder")
    small.raw = {key: value for key, value in small.raw.items() if key not in ("checkpoint", "log")}
    for key in sorted(small.keep - small.could_keep):
        raise ConfigError(
            f"`--keep {key}` has no effect: verify does not make it small, or sets it itself. Leave it out."
        )
    try:
        shrunk = config_from(small.raw)
        small_arch = architecture_of(shrunk.model)
    except ConfigError as error:
        kept = f" (kept: {', '.join(sorted(keep))})" if keep else ""
        raise ShrinkError("\n".join(f"the small run does not fit{kept}: {fault}" for fault in error.faults)) from None
    rows = STEPS * (shrunk.train.global_batch_size or 1)
    documents = small_documents(shrunk, small_arch.vocab_size, rows)
    _refuse_large(small_arch, shrunk)
    case = Case(shrunk, small_arch, documents, data, context, dtype, device)
    return Shrunk(case, tuple(small.changes))


def _check_keys(keep: Collection[str]) -> None:
    for key in keep:
        path: Path = tuple(key.split("."))
        if not known(Config, path):
            names = [".".join(path[:-1] + (name,)) for name in _names_below(path[:-1])]
            raise ConfigError(f"`--keep {key}` names no key of the configuration.{did_you_mean(key, names)}")


def _names_below(path: Path) -> list[str]:
    section = Config if not path else section_in(annotation_at(Config, path)) if known(Config, path) else None
    return list(fields_of(section)) if section else []


def _shrink_mesh(small: Small, plan: ExecutionPlan, full_mesh: bool, device: str) -> tuple[int, int, int]:
    """Data ranks, context ranks, and context ranks of a row that exchange heads."""
    row = 1 if plan.context is None else plan.context.ulysses
    rows = plan.context_ranks // row
    data = plan.data_ranks
    if not full_mesh:
        rows, row, data = _fewer(rows), _fewer(row), _fewer(data)
    if plan.context is not None:
        small.put("parallel.context", rows * row)
        small.put("parallel.context_method", plan.context.method.value, before="auto")
        small.put("parallel.ulysses", row if 1 < row < rows * row else None)
    context = small.get("parallel.context", 1)
    if small.get("parallel.data_shard") is not None or plan.data_ranks > 1:
        data = small.put("parallel.data_shard", data, before=plan.data_ranks)
    if device == "cuda" and context * data > torch.cuda.device_count():
        raise ShrinkError(
            f"{context} context x {data} data ranks need as many GPUs; {torch.cuda.device_count()} are here. "
            "Leave out --device cuda for the exact proof on the CPU."
        )
    if context * data > MOST_RANKS:
        key = "parallel.context" if context >= data else "parallel.data_shard"
        raise ShrinkError(
            f"{context} context x {data} data ranks are {context * data} processes; at most {MOST_RANKS} run here. "
            f"Make `{key}` smaller, or leave out --full-mesh and --keep {key}."
        )
    return data, context, row


def _fewer(ranks: int) -> int:
    """2 for more than two, or 3 where they are no power of two."""
    if ranks <= 2:
        return ranks
    return 2 if ranks & (ranks - 1) == 0 else 3


def _shrink_lengths(small: Small, config: Config, plan: ExecutionPlan, context: int) -> int:
    """Tokens of a microbatch: three chunks and half a one, whatever share of them a rank or row of ranks has."""
    unit = 2 * context * math.ceil(8 / (2 * context))
    chunk = 2 * unit
    if plan.stream is not None:
        chunk = small.put("fpdt.chunk_tokens", chunk, before=plan.stream.chunk_tokens)
        for key, value in _chunk_parts(config, plan, chunk, context).items():
            small.put(f"fpdt.{key}", *value[:1], before=value[1])
    return chunk * 3 + unit


def _chunk_parts(config: Config, plan: ExecutionPlan, chunk: int, context: int) -> dict[str, tuple[int, int | None]]:
    """FFN and loss chunks that do not divide a chunk, where the run's are smaller than one: `(small, before)`."""
    assert config.fpdt is not None and plan.stream is not None
    local = chunk // context
    parts: dict[str, tuple[int, int | None]] = {}
    ffn = plan.stream.ffn_chunk_tokens
    if config.fpdt.ffn_chunk_tokens is not None:
        whole = ffn is None or ffn >= plan.stream.chunk_tokens
        parts["ffn_chunk_tokens"] = (chunk if whole else context * max(1, round(local * 0.4)), ffn)
    if config.fpdt.loss_chunk_tokens is not None:
        parts["loss_chunk_tokens"] = (context * max(1, round(local * 0.6)), plan.loss_chunk_tokens)
    return parts


def _shrink_data(small: Small, config: Config, plan: ExecutionPlan, data: int, tokens: int) -> None:
    """Rows, documents and microbatches; nothing of the user's is read."""
    row = known_pack_size(config.data)
    per_microbatch = (
        1 if row is None or config.train.micro_batch_tokens is None else config.train.micro_batch_tokens // row
    )
    rows = 2 if per_microbatch > 1 else 1
    multiple = config.data.packing.document_multiple if config.data.packing else 1
    size = tokens // rows
    size += -size % multiple
    packing = dict(small.get("data.packing", {}))
    packed_file = packing.pop("file", None)
    packing.pop("npy_mask", None)
    if config.data.packing is not None or config.data.format == "packed":
        longest = config.data.sequence_length
        small.raw["data"]["packing"] = packing
        if longest is not None and row is not None and longest < row:
            size = small.put("data.packing.pack_size", size, before=row)
            small.put("data.sequence_length", max(2, size * longest // row))
        else:
            packing.pop("pack_size", None)
            size = small.put("data.sequence_length", size, before=row)
        if packed_file is not None or config.data.format == "packed":
            small.fix("data.packing.algorithm", "first_fit_shuffle", before=packed_file, why="packed anew")
        else:
            packing["algorithm"] = algorithm(config.data)
    else:
        size = small.put("data.sequence_length", size, before=row)
    kept = ("sequence_length", "packing", "train_on", "seed", "shuffle")
    section = {key: value for key, value in small.raw["data"].items() if key in kept}
    format_ = "text" if config.data.format == "text" else "messages"
    small.raw["data"] = {**section, "format": format_, "train": "made-up", "tokenizer": "made-up"}
    if section.get("packing") is not None:
        section["packing"].pop("window_documents", None)
    micro = rows * size
    if config.train.micro_batch_tokens is not None:
        small.put("train.micro_batch_tokens", micro)
    other = [key for key in OTHER_BATCH_SIZES if small.raw["train"].pop(key, None) is not None]
    accumulated = 2 * rows * data
    before = config.train.global_batch_size
    uneven = before is not None and before % max(1, per_microbatch * plan.data_ranks) != 0
    why = f"in place of {other[0]}" if other else ""
    small.fix("train.global_batch_size", accumulated + uneven, before=before, why=why)


def _shrink_training(small: Small, config: Config, dtype: Dtype) -> None:
    train = config.train
    small.fix("train.steps", STEPS)
    for key in ("epochs", "evaluate_every_steps", "max_nonfinite_steps"):
        small.raw["train"].pop(key, None)
    if train.schedule.name != "constant":
        small.changes.append(Change("train.schedule.name", train.schedule.name, "constant", "three steps"))
    small.raw["train"]["schedule"] = {"name": "constant"}
    rate = float(f"{small.get('model.init_std') / 20:.1g}")
    small.put("train.optimizer.lr", rate, why="so that three steps move the weights")
    least = LEAST_EPS[dtype]
    if train.optimizer.eps < least:
        small.fix("train.optimizer.eps", least, before=train.optimizer.eps, why="else rounding is scaled to a step")
    if train.grad_clip is not None:
        small.put("train.grad_clip", 0.5, before=train.grad_clip, why="so that it cuts")
    if config.fpdt is None:
        small.put("train.loss_chunk_tokens", 7, before=train.loss_chunk_tokens)
    if train.compile:
        small.fix("train.compile", False, why="a kernel, not a schedule")
    small.raw["train"]["precision"] = "fp32"  # the ranks are told theirs beside the configuration
    if train.precision != dtype:
        small.changes.append(Change("train.precision", train.precision, dtype))


def _replace_kernels(small: Small) -> None:
    """Kernels of a device; float64 has its own."""
    for key in ("backend", "disable"):
        if small.get(f"attention.{key}") is not None:
            small.fix(f"attention.{key}", None, why="kernels of a device; float64 has its own")


def _refuse_large(arch: Architecture, config: Config) -> None:
    """Before anything is allocated."""
    per_layer = arch.hidden_size * (
        2 * arch.dims_per_head * (arch.num_attention_heads + arch.groups) + 3 * arch.ffn_hidden_size
    )
    numbers = arch.num_layers * per_layer + 2 * arch.vocab_size * arch.hidden_size
    if numbers > MOST_PARAMETERS:
        raise ShrinkError(
            f"the small run would have {numbers:,} parameters; at most {MOST_PARAMETERS:,} are compared here. "
            "Keep fewer keys of `model`."
        )
    length = config.data.sequence_length or 0
    pairs = arch.num_attention_heads * length * length
    if pairs > MOST_PAIRS:
        raise ShrinkError(
            f"`data.sequence_length` {length} makes {pairs:,} scores a layer in the reference; at most {MOST_PAIRS:,} "
            "fit here. Do not keep it, or set it smaller."
        )
