"""What ranks do in tests of the context benchmark; importable, because ranks are other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from freight.bench.context_rank import MethodResult, Task, _sent_bytes, choice_of, measure
from freight.ops.attention import LocalAttention
from freight.ops.protocols import AttentionSpec
from freight.parallel.context import ContextAttention
from freight.parallel.mesh import build_mesh


def measured(task: Task) -> dict[str, MethodResult]:
    return measure(task, build_mesh(task.ranks, context=task.ranks))


def counted_and_computed(tasks: list[Task]) -> list[tuple[str, int, float]]:
    """Of each task's only method: bytes that all ranks really hand over, and what the formula says of them."""
    world = dist.get_world_size()
    mesh = build_mesh(world, context=world)
    results = []
    for task in tasks:
        (method,) = task.methods
        core = ContextAttention(choice_of(method, world), mesh, LocalAttention(), head_portions=task.portions)
        batch = core.shard(task.batch())
        q, k, v, dout = (x.index_select(0, batch.token_numbers) for x in task.inputs())
        leaves = q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        with counted() as sent:
            torch.autograd.grad(core(q, k, v, batch, AttentionSpec(scale=0.3)), leaves, dout)
        total = torch.tensor(sum(sent))
        dist.all_reduce(total)
        results.append((method, int(total), world * _sent_bytes(task, choice_of(method, world))))
    return results


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of every message that this rank sends to another one."""
    sent: list[int] = []
    real: dict[str, Callable[..., Any]] = {
        name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_single", "batch_isend_irecv")
    }

    def exchange(output: Any, input: Any, receive: Any = None, send: Any = None, *, group: Any, async_op: bool) -> Any:
        sizes = send or [input.numel() // group.size()] * group.size()
        sent.append((sum(sizes) - sizes[group.rank()]) * input.element_size())
        return real["all_to_all_single"](output, input, receive, send, group=group, async_op=async_op)

    def gather(output: Any, input: Any, *, group: Any, async_op: bool) -> Any:
        sent.append((group.size() - 1) * input.nbytes)
        return real["all_gather_single"](output, input, group=group, async_op=async_op)

    def pass_on(operations: list[Any]) -> Any:
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return real["batch_isend_irecv"](operations)

    replaced = {"all_to_all_single": exchange, "all_gather_single": gather, "batch_isend_irecv": pass_on}
    for name, function in replaced.items():
        setattr(dist, name, function)
    try:
        yield sent
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
