"""Training steps on a mesh of ranks; importable, because ranks are other processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from freight.config.architecture import Architecture
from freight.memory.stores import DeviceStore
from freight.memory.streaming import Stream, StreamingRunner
from freight.nn.decoder import Decoder
from freight.ops.attention import LocalAttention
from freight.ops.batch import IGNORE_INDEX, TokenBatch
from freight.ops.layout import SequenceLayout
from freight.ops.protocols import HeadTransport
from freight.parallel.context import ContextAttention
from freight.parallel.data import set_last_microbatch, shard, whole
from freight.parallel.gradients import global_grad_norm, sum_over_data
from freight.parallel.head_transport import UlyssesTransport
from freight.parallel.mesh import Axis, batch_axis, build_mesh, context_axes
from freight.parallel.row_transport import RowTransport
from tests.nn.small_decoders import build
from tests.parallel.context_tasks import choice_of


@dataclass(frozen=True)
class Training:
    """Three steps of a tiny decoder on a global batch of two microbatches.

    Args:
        method: Of context parallelism; `streamed`, and the ranks that exchange heads, for blocks that are streamed.
        model: Changes of the decoder.
        sparse: Only one token of each microbatch has a label, so that most ranks have none.
        precision: Of masters and arithmetic.
    """

    method: str = "ring"
    model: dict[str, Any] = field(default_factory=dict)
    sparse: bool = False
    precision: Literal["fp64", "fp32"] = "fp64"

    def microbatches(self) -> list[TokenBatch]:
        """Packed documents and padding; then one document whose labels begin late."""
        first = [list(range(1, 12)), [5, 3, 8], list(range(7, 20))]
        second = [[(7 * i) % 31 for i in range(22)]]
        labels = [[-100] * 18 + [3, 1, 4, -100]]
        none = [[-100] * len(document) for document in first]
        only = [[-100] * 20 + [9, -100]]
        return [
            TokenBatch.from_documents(first, none if self.sparse else None, pad_to=30, seed=1),
            TokenBatch.from_documents(second, only if self.sparse else labels, seed=1, microbatch=1),
        ]


@dataclass
class Steps:
    """What three steps gave: losses, norms, whole gradients of the first step, whole parameters after the last."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def train(data: int, context: int, runs: list[Training]) -> list[Steps]:
    """On a mesh of data x context ranks under FSDP."""
    mesh = build_mesh(data * context, context=context)
    return [_train(mesh, context, run) for run in runs]


def _train(mesh: DeviceMesh, context: int, run: Training) -> Steps:
    model, arch = build(**run.model)
    if run.precision == "fp32":
        model.float()
    shard(model, model.layers, mesh, run.precision)
    dealt = batch_axis(mesh)
    mine = run.microbatches()[dealt.get_local_rank() :: dealt.size()]
    if run.method.startswith("streamed"):
        row = int(run.method.split()[1])
        model.use_runner(StreamingRunner(Stream(16), DeviceStore(), transport=transport_of(arch, mesh, row)))
        mine = [batch.local(interleaved(batch, context, row), mesh[Axis.CP].get_local_rank()) for batch in mine]
    elif context > 1:
        core = ContextAttention(choice_of(run.method, context), mesh, LocalAttention())
        for block in model.blocks:
            block.attention_core = core
        mine = [core.shard(batch) for batch in mine]
    return three_steps(model, mine, mesh)


def interleaved(batch: TokenBatch, ranks: int, row: int) -> SequenceLayout:
    """Chunks of 16 tokens."""
    return SequenceLayout("interleaved", batch.stream_tokens, ranks, batch.cu_seqlens, chunk_tokens=16, row=row)


def transport_of(arch: Architecture, mesh: DeviceMesh, row: int) -> HeadTransport:
    heads, groups, axis = arch.num_attention_heads, arch.groups, mesh[Axis.CP]
    if row == axis.size():
        return UlyssesTransport(heads, groups, axis.get_group())
    across, within = context_axes(mesh, row)
    return RowTransport(heads, groups, within.get_group() if row > 1 else None, across.get_group())


def three_steps(model: Decoder, microbatches: list[TokenBatch], mesh: DeviceMesh) -> Steps:
    """Plain SGD, which shows every wrong factor."""
    steps = Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        labels = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in microbatches)
        count = int(sum_over_data(torch.tensor(labels), mesh))
        nll = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(microbatches):
            set_last_microbatch(model, index == len(microbatches) - 1)
            sums = model(batch)
            (sums.objective / count).backward()
            nll += sums.nll
        steps.losses.append(float(sum_over_data(nll, mesh) / count))
        steps.norms.append(float(global_grad_norm(model.parameters())))
        if step == 0:
            steps.gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    steps.parameters = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return steps
