"""What ranks do in tests of context parallelism; importable, because ranks are other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from freight.nn.decoder import Decoder
from freight.ops.attention import LocalAttention
from freight.ops.batch import IGNORE_INDEX, TokenBatch
from freight.ops.layout import SequenceLayout
from freight.ops.protocols import AttentionSpec
from freight.parallel.context import ContextAttention
from freight.parallel.context_method import ContextChoice, ContextMethod
from freight.parallel.data import set_last_microbatch, shard, whole
from freight.parallel.gradients import global_grad_norm, sum_over_data
from freight.parallel.head_transport import UlyssesTransport
from freight.parallel.mesh import Axis, batch_axis, build_mesh
from tests.nn.small_decoders import build


def choice_of(name: str, ranks: int) -> ContextChoice:
    """`ring`, `ring contiguous`, `all_gather`, `ulysses`, `hybrid`."""
    method, *rest = name.split()
    rows = {"ulysses": ranks, "hybrid": 4 if ranks > 4 else 2}
    return ContextChoice(ContextMethod(method), rows.get(method, 1), "a test", contiguous="contiguous" in rest)


@dataclass(frozen=True)
class Case:
    """One attention over a stream."""

    method: str
    lengths: tuple[int, ...] = (13, 5, 19)
    padding: int = 2
    heads: int = 8
    groups: int = 4
    spec: AttentionSpec = field(default_factory=lambda: AttentionSpec(scale=0.4, layer=1))
    backend: str = "auto"
    dtype: torch.dtype = torch.float64
    overlap: bool = True
    portions: int = 2
    changed: int | None = None  # a document whose tokens are replaced

    def batch(self) -> TokenBatch:
        documents = [[0] * n for n in self.lengths]
        return TokenBatch.from_documents(documents, pad_to=sum(self.lengths) + self.padding, seed=5, step=2)

    def inputs(self) -> list[Tensor]:
        """q, k, v and the gradient of the context, of the whole stream."""
        batch = self.batch()
        generator = torch.Generator().manual_seed(batch.tokens)
        shapes = [(batch.tokens, heads, 8) for heads in (self.heads, self.groups, self.groups, self.heads)]
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        if self.changed is not None:
            start, length = batch.spans[self.changed]
            for x in tensors:
                x[start : start + length] *= -3
        return [x.to(self.dtype) for x in tensors]


def plain(case: Case) -> list[Tensor]:
    """Context and gradients of q, k, v in one process."""
    *inputs, dout = case.inputs()
    leaves = [x.requires_grad_() for x in inputs]
    context = LocalAttention(case.backend)(*leaves, case.batch(), case.spec)
    return [context.detach(), *torch.autograd.grad(context, leaves, dout)]


def attend(cases: list[Case]) -> list[list[Tensor]]:
    """The same on the ranks of this world; every rank returns whole streams."""
    world = dist.get_world_size()
    mesh = build_mesh(world, context=world)
    results = []
    for case in cases:
        core = ContextAttention(
            choice_of(case.method, world),
            mesh,
            LocalAttention(case.backend),
            overlap=case.overlap,
            head_portions=case.portions,
        )
        whole = case.batch()
        batch = core.shard(whole)
        assert batch.layout is not None
        *inputs, dout = (split(x, batch) for x in case.inputs())
        leaves = [x.requires_grad_() for x in inputs]
        context = core(*leaves, batch, case.spec)
        parts = [context.detach(), *torch.autograd.grad(context, leaves, dout)]
        results.append([join(x, batch)[: whole.tokens] for x in parts])
    return results


def split(x: Tensor, batch: TokenBatch) -> Tensor:
    """This rank's rows of a tensor of the whole stream; ones, of all things, at the layout's own padding."""
    assert batch.layout is not None
    padded = torch.cat([x, x.new_ones(batch.layout.pad, *x.shape[1:])])
    return padded[batch.token_numbers].clone()


def join(x: Tensor, batch: TokenBatch) -> Tensor:
    """All ranks' rows, in the order of the stream."""
    assert batch.layout is not None
    parts: list[Any] = [torch.empty_like(x) for _ in range(batch.layout.ranks)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)[batch.layout.inverse()]


def running_mean(methods: list[str], windows: list[int | None]) -> list[list[list[float]]]:
    """With q = k = 0 and v = token id, attention is the mean of what a token sees."""
    world = dist.get_world_size()
    mesh = build_mesh(world, context=world)
    whole = TokenBatch.from_documents([[1, 2, 3], [4, 5, 6, 7, 8]], pad_to=10)
    means = []
    for method in methods:
        core = ContextAttention(choice_of(method, world), mesh, LocalAttention())
        batch = core.shard(whole)
        zeros = torch.zeros(batch.tokens, 4, 8, dtype=torch.float64)
        values = batch.input_ids.double().view(-1, 1, 1).expand(-1, 4, 8).contiguous()
        contexts = [core(zeros, zeros, values, batch, AttentionSpec(scale=1.0, window=window)) for window in windows]
        means.append([join(context, batch)[: whole.tokens, 0, 0].tolist() for context in contexts])
    return means


@dataclass(frozen=True)
class Training:
    """Three steps of a tiny decoder on a global batch of two microbatches.

    Args:
        method: Of context parallelism.
        model: Changes of the decoder.
        sparse: Only one token of the global batch has a label, so that most ranks have none.
    """

    method: str = "ring"
    model: dict[str, Any] = field(default_factory=dict)
    sparse: bool = False

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
    core = ContextAttention(choice_of(run.method, context), mesh, LocalAttention()) if context > 1 else None
    model = build(**run.model)[0]
    if core is not None:
        for block in model.blocks:
            block.attention_core = core
    shard(model, model.layers, mesh, "fp64")
    dealt = batch_axis(mesh)
    mine = run.microbatches()[dealt.get_local_rank() :: dealt.size()]
    return three_steps(model, [core.shard(batch) for batch in mine] if core else mine, mesh)


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


def round_trips(cases: list[tuple[int, int]], chunk: int) -> list[dict[str, Any]]:
    """Chunks of an interleaved layout through the transport and back.

    Args:
        cases: Query heads and key-value heads.
        chunk: Tokens of a chunk of all ranks.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    group = build_mesh(world, context=world)[Axis.CP].get_group()
    layout = SequenceLayout("interleaved", 2 * chunk + world, world, chunk_tokens=chunk)
    results = []
    for heads, groups in cases:
        transport = UlyssesTransport(heads, groups, group)
        # Every number says which token and head it is.
        q, k = (
            100.0 * torch.arange(layout.tokens).view(-1, 1, 1) + torch.arange(n).view(-1, 1) for n in (heads, groups)
        )
        q, k = q[layout.index(rank)].expand(-1, -1, 2), k[layout.index(rank)].expand(-1, -1, 2)
        pieces = (chunk // world, chunk // world, 1)
        arrived, returned = [], []
        for of_q, of_k in zip(q.split(pieces), k.split(pieces), strict=True):
            there = transport.scatter_heads(of_q, of_k, -of_k, kv=2)
            (queries,) = transport.scatter_heads(of_q)
            assert torch.equal(queries, there[0])
            arrived.append([x[..., 0] for x in there])
            back = transport.gather_heads(*(x.to(torch.bfloat16) for x in (there[0] % 100, *there[1:])), kv=2)
            returned.append([x[..., 0] for x in back])
        results.append(
            dict(
                share=transport.share,
                first_head=transport.first_head,
                num_keys=transport.num_keys,
                arrived=[torch.cat(x) for x in zip(*arrived, strict=True)],
                returned=[torch.cat(x) for x in zip(*returned, strict=True)],
                sent=[q[..., 0], k[..., 0]],
            )
        )
    return results


def shapes_on_many_ranks(world: int, cases: list[Case]) -> list[list[tuple[list[int], list[int]]]]:
    """Forward and backward as each rank of a larger world, with collectives that move nothing.

    Returns:
        By case: of every rank, how much it sends to and receives from each other one in all-to-alls of a whole run.
    """
    dist.destroy_process_group()
    traffic: list[list[tuple[list[int], list[int]]]] = [[] for _ in cases]
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        mesh = build_mesh(world, context=world)
        for number, case in enumerate(cases):
            core = ContextAttention(choice_of(case.method, world), mesh, LocalAttention())
            batch = core.shard(case.batch())
            *inputs, dout = (split(x, batch).requires_grad_() for x in case.inputs())
            with counted_all_to_alls() as counts:
                context = core(*inputs, batch, case.spec)
                grads = torch.autograd.grad(context, inputs, dout)
            assert context.shape == inputs[0].shape and [g.shape for g in grads] == [x.shape for x in inputs]
            size = core.within.size() if core.within else 1
            sent, received = ([sum(of_rank) for of_rank in zip(*counts[way], strict=True)] for way in (0, 1))
            traffic[number].append((sent or [0] * size, received or [0] * size))
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return traffic


@contextmanager
def counted_all_to_alls() -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Elements sent to and received from each rank of the group, call by call."""
    real, counts = dist.all_to_all_single, ([], [])

    def counting(output: Tensor, input: Tensor, receive: Any, send: Any, group: Any, async_op: bool) -> Any:
        for way, tensor, splits in ((0, input, send), (1, output, receive)):
            size = group.size()
            assert splits is not None or tensor.numel() % size == 0
            counts[way].append(splits or [tensor.numel() // size] * size)
            assert sum(counts[way][-1]) == tensor.numel()
        return real(output, input, receive, send, group=group, async_op=async_op)

    dist.all_to_all_single = counting
    try:
        yield counts
    finally:
        dist.all_to_all_single = real


def ring_messages(cases: list[Case]) -> list[int]:
    """Point-to-point messages that this rank sends in forward and backward."""
    world = dist.get_world_size()
    mesh = build_mesh(world, context=world)
    real, sent = dist.batch_isend_irecv, []

    def counting(operations: list[Any]) -> Any:
        sent.extend(operation for operation in operations if operation.op is dist.isend)
        return real(operations)

    results = []
    dist.batch_isend_irecv = counting
    try:
        for case in cases:
            core = ContextAttention(choice_of(case.method, world), mesh, LocalAttention())
            batch = core.shard(case.batch())
            *inputs, dout = (split(x, batch).requires_grad_() for x in case.inputs())
            torch.autograd.grad(core(*inputs, batch, case.spec), inputs, dout)
            results.append(len(sent))
            sent.clear()
    finally:
        dist.batch_isend_irecv = real
    return results
