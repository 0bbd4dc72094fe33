"""What ranks do in tests of context parallelism; importable, because ranks are other processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freight.ops.attention import LocalAttention
from freight.ops.batch import TokenBatch
from freight.ops.protocols import AttentionSpec
from freight.parallel.context import ContextAttention
from freight.parallel.context_method import ContextChoice, ContextMethod
from freight.parallel.mesh import build_mesh


def choice_of(name: str, ranks: int) -> ContextChoice:
    """`ring`, `ring contiguous`, `all_gather`, `ulysses`, `hybrid`."""
    method, *rest = name.split()
    rows = {"ulysses": ranks, "hybrid": ranks // 2}
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
