"""What ranks do in tests of context parallelism; importable, because ranks are other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from freight.ops.attention import LocalAttention
from freight.ops.batch import TokenBatch
from freight.ops.protocols import AttentionSpec
from freight.parallel.context import ContextAttention
from freight.parallel.context_method import ContextChoice, ContextMethod
from freight.parallel.mesh import build_mesh


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
            with counted_all_to_alls(core.within) as counts:
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
def counted_all_to_alls(row: dist.ProcessGroup | None) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Elements sent to and received from each rank of a row, call by call; what crosses rows is not counted."""
    real, counts = dist.all_to_all_single, ([], [])

    def counting(
        output: Tensor, input: Tensor, receive: Any = None, send: Any = None, *, group: Any, async_op: bool
    ) -> Any:
        for way, tensor, splits in ((0, input, send), (1, output, receive)) if group is row else ():
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
