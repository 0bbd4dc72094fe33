"""How the ranks of a run share its tokens, and how its blocks are run: every number resolved, before any rank starts.

What `auto` means is decided here, from integers alone, so that `check`, the planner and every rank find the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from freight.config.architecture import Architecture
from freight.config.memory_checks import larger_than_chunk, nearest
from freight.config.schema import Config
from freight.errors import ConfigError
from freight.memory.slots import Slab, Slots
from freight.memory.stores import Tier
from freight.memory.stream import Stream
from freight.memory.stream_sizes import StreamSizes
from freight.parallel.context_method import ContextChoice, choose_context_method
from freight.parallel.head_split import HeadSplit

AUTO_CHUNK_TOKENS = 65_536
AUTO_LOSS_CHUNK_TOKENS = 1024
KEYS_SHARE = 4  # keys, values and their gradients may take a quarter of the device

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class ExecutionPlan:
    """How microbatches are dealt out and blocks run.

    Args:
        world_size: Processes.
        context_ranks: Ranks that share the tokens of a microbatch.
        context: Method of theirs; None for one rank.
        runner: `plain`, `recompute` or `stream`.
        tokens: Of a microbatch, padded to the layout's unit.
        stream: Chunks of a streamed run, and what is kept.
        loss_chunk_tokens: Tokens whose logits exist at one time, over all context ranks, in a streamed run.
        tier: Where layer inputs and what else backward needs are kept.
        slabs: Slots on the tier.
    """

    world_size: int
    context_ranks: int
    context: ContextChoice | None
    runner: Literal["plain", "recompute", "stream"]
    tokens: int
    stream: Stream | None
    loss_chunk_tokens: int | None
    tier: Tier
    slabs: dict[str, Slab]

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of context ranks, that work on different microbatches."""
        return self.world_size // self.context_ranks

    @property
    def rows(self) -> int:
        """Rows of context ranks that exchange heads."""
        return 1 if self.context is None else self.context_ranks // self.context.ulysses

    @property
    def tier_bytes(self) -> int:
        """Bytes of a rank on host or disk."""
        return 0 if self.tier == "none" else Slots(self.slabs).total_bytes


def resolve_execution(
    config: Config,
    arch: Architecture,
    tokens: int,
    *,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    device_bytes: int | None = None,
    precision: str | None = None,
) -> ExecutionPlan:
    """Work out how a run is spread over ranks and kept in memory.

    Args:
        config: Checked by itself.
        arch: The model.
        tokens: Of a microbatch.
        world_size: Processes; None = what the configuration needs.
        ranks_per_node: Processes that share a node; None = all.
        device_bytes: Memory of the device that computes, for `fpdt.kv: auto`; None = enough.
        precision: Of the computation; None = `train.precision`.

    Raises:
        ConfigError: All faults.
    """
    parallel = config.parallel
    if world_size is not None and (found := list(world_faults(config, world_size))):
        raise ConfigError(*found)
    world = world_size or parallel.context * (parallel.data_shard or 1)
    choice = _context_choice(config, arch, tokens, ranks_per_node)
    unit = parallel.context
    if choice is not None and config.fpdt is not None and choice.ulysses < parallel.context:
        unit = (parallel.context // choice.ulysses) * math.lcm(2, choice.ulysses)  # an early and a late piece a row
    tokens += -tokens % unit
    dtype = DTYPES[precision or config.train.precision]
    if config.fpdt is None:
        recompute = config.recompute is not None
        tier = config.offload.layer_inputs if recompute else "none"
        bytes_of_input = tokens // parallel.context * arch.hidden_size * dtype.itemsize
        slabs = {"input": Slab(arch.num_layers, bytes_of_input)}
        runner = "recompute" if recompute else "plain"
        return ExecutionPlan(world, parallel.context, choice, runner, tokens, None, None, tier, slabs)
    sizes = _stream_sizes(config, arch, choice, tokens, unit, dtype, device_bytes)
    loss = _loss_chunk(config, sizes.stream.chunk_tokens)
    tier = config.fpdt.offload
    return ExecutionPlan(world, parallel.context, choice, "stream", tokens, sizes.stream, loss, tier, sizes.slabs())


def world_faults(config: Config, world_size: int) -> Iterator[str]:
    """Why the processes of a run cannot be dealt out; nothing if they can."""
    context, data = config.parallel.context, config.parallel.data_shard
    processes = f"{world_size} process{'es' * (world_size > 1)}"
    if world_size % context:
        *some, last = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        fitting = f"{', '.join(some)} or {last}" if some else last
        yield (
            f"`parallel.context` {context} must divide the {processes}. Use {fitting}, or start {context} processes: "
            f"freight train CONFIG --ranks {context}."
        )
    elif data is not None and data * context != world_size:
        yield (
            f"`parallel.data_shard` {data} x `parallel.context` {context} = {data * context} must be the {processes}. "
            f"Use `parallel.data_shard` {world_size // context}, or null."
        )


def _context_choice(
    config: Config, arch: Architecture, tokens: int, ranks_per_node: int | None
) -> ContextChoice | None:
    """How context ranks reach each other's tokens; None for one rank.

    Raises:
        ConfigError: The method does not fit.
    """
    parallel = config.parallel
    if parallel.context == 1:
        return None
    return choose_context_method(
        parallel.context_method,
        ranks=parallel.context,
        heads=arch.num_attention_heads,
        groups=arch.groups,
        ranks_per_node=math.gcd(ranks_per_node or parallel.context, parallel.context),
        windows=[arch.window_of(layer) for layer in range(arch.num_layers)],
        local_tokens=-(-tokens // parallel.context),
        ulysses=parallel.ulysses,
        streamed=config.fpdt is not None,
    )


def _stream_sizes(
    config: Config,
    arch: Architecture,
    choice: ContextChoice | None,
    tokens: int,
    unit: int,
    dtype: torch.dtype,
    device_bytes: int | None,
) -> StreamSizes:
    """Chunk sizes, with `auto` resolved.

    Args:
        config: With `fpdt`.
        arch: The model.
        choice: How context ranks exchange heads; None for one rank.
        tokens: Of a padded microbatch.
        unit: A chunk is a multiple of it.
        dtype: Of the computation.
        device_bytes: Memory of the device; None = enough.

    Raises:
        ConfigError: A chunk that does not fit.
    """
    fpdt, ranks = config.fpdt, config.parallel.context
    assert fpdt is not None
    chunk = fpdt.chunk_tokens
    if chunk == "auto":
        chunk = AUTO_CHUNK_TOKENS if tokens >= 4 * AUTO_CHUNK_TOKENS else tokens // 4
        chunk = _down(chunk, unit)
    if chunk % unit:
        raise ConfigError(
            f"`fpdt.chunk_tokens` must be a multiple of {unit}: {ranks} context ranks come in rows, "
            f"and a row holds an early and a late piece of each chunk; got {chunk}. Use {nearest(chunk, unit)}."
        )
    if chunk >= tokens:
        what = "the longest row" if config.train.micro_batch_tokens is None else "a microbatch"
        half = _down(tokens // 2, unit)
        use = f"Use at most {half} or remove `fpdt`." if half < tokens else "Remove `fpdt`."
        raise ConfigError(
            f"`fpdt.chunk_tokens` {chunk} is not smaller than {what}, {tokens} tokens, so nothing would be streamed. "
            f"{use}"
        )
    ffn = fpdt.ffn_chunk_tokens
    if ffn == "auto":
        ffn = _down(chunk // 2, ranks)
    if ffn is not None and ffn > chunk:
        raise ConfigError(larger_than_chunk("ffn_chunk_tokens", ffn, chunk))
    row = ranks if choice is None else choice.ulysses
    split = HeadSplit(arch.num_attention_heads, arch.groups, row)
    sizes = StreamSizes(
        Stream(chunk, ffn, "device", fpdt.save_attention, config.overlap.context),
        tokens,
        arch.num_layers,
        arch.hidden_size,
        arch.num_attention_heads,
        arch.groups,
        arch.dims_per_head,
        dtype,
        ranks,
        rows=ranks // row,
        keys_here=max(share.num_keys if split.runs(share) is None else share.num_queries for share in split.shares),
    )
    kv = fpdt.kv
    if kv == "auto":
        small = device_bytes is None or KEYS_SHARE * sizes.key_value_bytes <= device_bytes
        kv = "device" if small or fpdt.offload == "none" else "offload"
    return replace(sizes, stream=replace(sizes.stream, kv=kv))


def _loss_chunk(config: Config, chunk: int) -> int:
    """Tokens whose logits exist at one time, over all context ranks.

    Raises:
        ConfigError: More than a chunk.
    """
    assert config.fpdt is not None
    loss = config.fpdt.loss_chunk_tokens
    if loss is None:
        return chunk
    if loss == "auto":
        return min(chunk, _down(max(AUTO_LOSS_CHUNK_TOKENS, chunk // 32), config.parallel.context))
    if loss > chunk:
        raise ConfigError(larger_than_chunk("loss_chunk_tokens", loss, chunk))
    return loss


def _down(number: int, unit: int) -> int:
    """The largest multiple of a unit up to a number; at least the unit."""
    return max(number - number % unit, unit)
