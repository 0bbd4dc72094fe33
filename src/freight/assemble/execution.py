"""How one rank runs a model: which tokens of a microbatch it holds, its attention between ranks, its way with blocks.

The plan is integers that every rank finds alike; this makes of it the objects that hold groups, threads and memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Self, cast

import torch

from freight.config.architecture import Architecture
from freight.config.schema import AttentionConfig, Config
from freight.memory.recompute import RecomputeRunner
from freight.memory.stores import open_store
from freight.memory.stream import LocalTransport
from freight.memory.streaming import StreamingRunner
from freight.nn.block import PlainRunner
from freight.ops.attention import LocalAttention
from freight.ops.batch import TokenBatch
from freight.ops.layout import LayoutKind, SequenceLayout
from freight.ops.protocols import AttentionCore, BlockRunner, HeadTransport, TensorStore
from freight.ops.shard_plan import balance, pairs_by_share
from freight.ops.streamed_cross_entropy import RowStream
from freight.parallel.context import ContextAttention
from freight.parallel.head_transport import UlyssesTransport
from freight.parallel.mesh import Axis, DeviceMesh, context_axes
from freight.parallel.row_transport import RowTransport
from freight.planner.execution import ExecutionPlan


class Execution:
    """What a model runs with; use it as a context manager, or `close` it, so that its tier is given back.

    Args:
        plan: Of the run.
        rank: Of the context axis.
        core: Attention between tokens.
        runner: Executes blocks.
        store: Keeps what backward needs; None if everything stays where it is.
        windows: Sliding window of every layer; None = full attention.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        rank: int,
        core: AttentionCore | ContextAttention,
        runner: BlockRunner,
        store: TensorStore | None,
        windows: Sequence[int | None],
    ) -> None:
        self.plan, self.core, self.runner, self.store = plan, core, runner, store
        self._rank, self._windows = rank, windows

    @property
    def loss_stream(self) -> RowStream | None:
        """How the loss reads the last hidden states; None where they are all here."""
        if self.plan.stream is None or self.store is None:
            return None
        return RowStream(self.store, self.plan.stream.chunk_tokens // self.plan.context_ranks)

    @property
    def loss_chunk_tokens(self) -> int | None:
        """Label tokens of this rank whose logits exist at one time; None = as `train.loss_chunk_tokens` says."""
        loss = self.plan.loss_chunk_tokens
        return None if loss is None else loss // self.plan.context_ranks

    def deal(self, batch: TokenBatch) -> TokenBatch:
        """This rank's part of a microbatch."""
        if self.plan.context is None:
            return batch
        return batch.local(self._layout(batch), self._rank)

    def _layout(self, batch: TokenBatch) -> SequenceLayout:
        """How a microbatch is dealt out to the context ranks."""
        if isinstance(self.core, ContextAttention):
            return self.core.layout(batch)
        assert self.plan.stream is not None and self.plan.context is not None
        return SequenceLayout(
            LayoutKind.INTERLEAVED,
            batch.stream_tokens,
            self.plan.context_ranks,
            batch.cu_seqlens,
            chunk_tokens=self.plan.stream.chunk_tokens,
            row=self.plan.context.ulysses,
        )

    def metrics(self, batches: Sequence[TokenBatch] = ()) -> dict[str, float]:
        """How well a step's attention was spread, and seconds that computation has waited for the tier so far.

        Args:
            batches: Whole microbatches of the step.
        """
        metrics = {}
        if self.plan.context is not None and batches:
            metrics["context/balance"] = self._balance(batches)
        if self.store is not None and not self.store.on_device:
            name = "fpdt/wait_seconds" if self.plan.stream is not None else "memory/offload_wait_seconds"
            metrics[name] = self.store.wait_seconds
        return metrics

    def _balance(self, batches: Sequence[TokenBatch]) -> float:
        """Mean over largest number of attended pairs of the ranks, from integers; 1 = nobody waits."""
        if self.plan.rows == 1:
            return 1.0  # all have every token, of some heads
        work = [0] * self.plan.rows
        for batch, (window, layers) in product(batches, Counter(self._windows).items()):
            pairs = pairs_by_share(self._layout(batch), batch.cu_seqlens, batch.lengths, window=window)
            work = [so_far + layers * here for so_far, here in zip(work, pairs, strict=True)]
        return balance(work)

    def close(self) -> None:
        """Give the tier back."""
        if self.store is not None:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_execution(
    plan: ExecutionPlan, config: Config, arch: Architecture, mesh: DeviceMesh, device: torch.device | str
) -> Execution:
    """Make what a rank runs its model with.

    Args:
        plan: Of `resolve_execution`, for this number of processes.
        config: Kernels, overlap and the offload directory.
        arch: The model.
        mesh: Of `build_mesh` with `plan.context_ranks`.
        device: Where the model computes.

    Raises:
        OffloadError: The tier has no room.

    **Communication**: creates two groups for the hybrid; call it once, on all ranks alike.
    """
    local = local_attention(config.attention)
    rank = mesh[Axis.CP].get_local_rank()
    core: AttentionCore | ContextAttention = cast(AttentionCore, local)
    if plan.context is not None and plan.stream is None:
        core = ContextAttention(plan.context, mesh, local, overlap=config.overlap.context)
    windows = [arch.window_of(layer) for layer in range(arch.num_layers)]
    if plan.runner == "plain":
        return Execution(plan, rank, core, PlainRunner(), None, windows)
    transport = _transport(plan, arch, mesh) if plan.stream is not None else None
    store = open_store(plan.tier, plan.slabs, device=device, directory=config.offload.directory)
    if plan.stream is None:
        return Execution(plan, rank, core, RecomputeRunner(store, config.offload.prefetch_groups), store, windows)
    return Execution(plan, rank, core, StreamingRunner(plan.stream, store, local, transport), store, windows)


def local_attention(config: AttentionConfig) -> LocalAttention:
    """Attention of one rank, with the kernels that were asked for."""
    return LocalAttention(config.backend, disable=config.disable, deterministic=config.deterministic)


def _transport(plan: ExecutionPlan, arch: Architecture, mesh: DeviceMesh) -> HeadTransport:
    """How a streamed chunk's heads travel."""
    heads, groups = arch.num_attention_heads, arch.groups
    if plan.context is None:
        return LocalTransport()
    if plan.rows == 1:
        return UlyssesTransport(heads, groups, mesh[Axis.CP].get_group())
    across, within = context_axes(mesh, plan.context.ulysses)
    return RowTransport(heads, groups, within.get_group() if plan.context.ulysses > 1 else None, across.get_group())
