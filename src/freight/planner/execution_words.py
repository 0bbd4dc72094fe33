"""In words: how a run is spread over ranks, and what it keeps in memory where."""

from __future__ import annotations

from collections.abc import Iterator

from freight.config.schema import Config
from freight.ops.shard_plan import balance, pairs_by_share
from freight.parallel.context_method import ContextMethod
from freight.planner.execution import ExecutionPlan
from freight.planner.tier_space import amount


def execution_words(execution: ExecutionPlan, config: Config, device: str) -> Iterator[str]:
    """Ranks, context parallelism, recomputation and streaming; nothing where all is plain.

    Args:
        execution: The plan.
        config: It was made of.
        device: `cpu` or `cuda`.
    """
    yield from _rank_words(execution)
    yield from _context_words(execution, config)
    yield from _recompute_words(execution)
    yield from _stream_words(execution)
    if execution.tier == "host" and device == "cpu":
        key = "fpdt.offload" if execution.stream is not None else "offload.layer_inputs"
        yield f"`{key}: host` on a CPU device costs a copy and saves nothing; `disk` would"


def _rank_words(execution: ExecutionPlan) -> Iterator[str]:
    if execution.world_size > 1:
        yield (
            f"ranks: {execution.world_size} = {execution.data_ranks} with microbatches of their own x "
            f"{execution.context_ranks} that share one; parameters, gradients and optimizer are sharded over all"
        )


def _context_words(execution: ExecutionPlan, config: Config) -> Iterator[str]:
    choice = execution.context
    if choice is None:
        return
    ranks = execution.context_ranks
    if execution.stream is not None:
        lie = "a part of every chunk each"
    elif choice.ulysses == ranks or choice.contiguous:
        lie = "one piece of the row each"
    else:
        lie = "an early and a late piece of every document each"
    how = {
        ContextMethod.RING: f"keys and values circle over {ranks} ranks",
        ContextMethod.ALL_GATHER: f"keys and values are gathered from {ranks} ranks",
        ContextMethod.ULYSSES: f"{ranks} ranks exchange tokens for heads",
        ContextMethod.HYBRID: (
            f"rows of {choice.ulysses} ranks exchange tokens for heads, {execution.rows} rows share keys"
        ),
    }[choice.method]
    wait = "" if config.overlap.context else "; every message is waited for (overlap.context is false)"
    yield f"context: {choice.method}: {how}, {lie} ({choice.reason}){_balance_words(execution)}{wait}"


def _balance_words(execution: ExecutionPlan) -> str:
    """How evenly one document of full length is attended to; nothing where that is even by heads."""
    choice = execution.context
    if choice is None or execution.rows == 1 or execution.stream is not None:
        return ""
    layout = choice.layout(execution.tokens, execution.context_ranks)
    pairs = pairs_by_share(layout, (0, layout.tokens), (execution.tokens,))
    return f"; balance of one full document {balance(pairs):.2f}"


def _recompute_words(execution: ExecutionPlan) -> Iterator[str]:
    if execution.runner != "recompute":
        return
    where = {"none": "stay on the device", "host": "go to host memory", "disk": "go to disk"}[execution.tier]
    yield f"recompute: all layers, one by one; layer inputs {where}{_tier_bytes(execution)}"


def _stream_words(execution: ExecutionPlan) -> Iterator[str]:
    stream = execution.stream
    if stream is None:
        return
    chunks = -(-execution.tokens // stream.chunk_tokens)
    tail = execution.tokens % stream.chunk_tokens
    last = f", the last one of {tail:,}" if tail else ""
    ffn = stream.ffn_chunk_tokens or stream.chunk_tokens
    yield (
        f"fpdt: {execution.tokens:,} tokens in {chunks} chunks of {stream.chunk_tokens:,}{last}; the MLP takes "
        f"{ffn:,} tokens at a time, the loss {execution.loss_chunk_tokens:,}"
    )
    saved = {
        "none": "layer inputs (attention runs again in backward)",
        "context": "layer inputs and attention outputs",
        "all": "layer inputs, attention outputs, keys and values",
    }[stream.save_attention]
    where = {"none": "on the device", "host": "in host memory", "disk": "on disk"}
    keys = where[execution.tier] if stream.kv == "offload" else "on the device"
    yield (
        f"fpdt: {saved} are kept {where[execution.tier]}{_tier_bytes(execution)}; keys and values of the layer being "
        f"run {keys}"
    )


def _tier_bytes(execution: ExecutionPlan) -> str:
    return "" if execution.tier == "none" else f": {amount(execution.tier_bytes)} per rank"
