"""One rank of the context benchmark: `python -m freight.bench.context_rank RANK FOLDER`.

Every method has sides that take turns: computing only (the same code over groups that move nothing), every message
waited for at once, and messages under way while others are computed. The last two must give the same bits before
anything is timed. Times go home as lists, so that the slowest rank of each turn can be found.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freight.bench import ringmaster_ulysses
from freight.ops.attention import LocalAttention
from freight.ops.batch import TokenBatch
from freight.ops.layout import LayoutKind, SequenceLayout
from freight.ops.protocols import AttentionSpec
from freight.ops.shard_plan import travel
from freight.parallel.context import ContextAttention
from freight.parallel.context_bytes import sent_bytes
from freight.parallel.context_method import ContextChoice, ContextMethod
from freight.parallel.local_group import local_group, silent_mesh
from freight.parallel.mesh import Axis, DeviceMesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RIVAL = "ringmaster"
Step = Callable[[], list[Tensor]]
# Of the largest value; both sides round differently.
RIVAL_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


@dataclass(frozen=True)
class Task:
    """What all ranks do.

    Args:
        ranks: Number of them.
        methods: Names of `ContextMethod`.
        tokens: Of the whole stream.
        documents: Of equal length that it holds.
        heads: Query heads.
        groups: Key-value heads.
        head_dim: Of both.
        dtype: `fp32` or `bf16`.
        portions: Portions that heads are exchanged in.
        repeats: Turns of each side.
        interface: Whose counter says what went over the wire.
        timeout_seconds: Of every collective.
    """

    ranks: int
    methods: tuple[str, ...]
    tokens: int
    documents: int
    heads: int
    groups: int
    head_dim: int
    dtype: str
    portions: int
    repeats: int
    interface: str
    timeout_seconds: float

    def batch(self) -> TokenBatch:
        """The stream; only its lengths matter here."""
        return TokenBatch.from_documents([[0] * (self.tokens // self.documents)] * self.documents)

    def inputs(self) -> list[Tensor]:
        """q, k, v and the gradient of the context, of the whole stream."""
        generator = torch.Generator().manual_seed(0)
        widths = (self.heads, self.groups, self.groups, self.heads)
        shapes = [(self.tokens, width, self.head_dim) for width in widths]
        return [torch.randn(shape, generator=generator).to(DTYPES[self.dtype]) for shape in shapes]


@dataclass
class MethodResult:
    """What one rank saw of one method.

    Args:
        seconds: By side, of every turn.
        wire_bytes: By side, sent by this rank's interface in all turns.
        sent_bytes: By formula, forward and backward.
        rival_reason: Why the other program was not measured; empty if it was.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    wire_bytes: dict[str, int] = field(default_factory=dict)
    sent_bytes: float = 0.0
    rival_reason: str = ""


def run_rank(task: Task, rank: int, meeting: Path) -> dict[str, MethodResult]:
    """Measure every method as one of the ranks."""
    torch.set_num_threads(1)
    with local_group(meeting, rank, task.ranks, task.timeout_seconds) as mesh:
        return measure(task, mesh)


def measure(task: Task, mesh: DeviceMesh) -> dict[str, MethodResult]:
    """Measure every method over a mesh of its own ranks."""
    silent, rival, reason = silent_mesh(task.ranks), None, ""
    try:
        rival = _rival(task, mesh)
    except ringmaster_ulysses.CannotRun as error:
        reason = str(error)
    results = {}
    for method in task.methods:
        sides = _sides(task, method, mesh, silent) | ({} if rival is None else {RIVAL: rival})
        result = MethodResult(sent_bytes=_sent_bytes(task, choice_of(method, task.ranks)), rival_reason=reason)
        _take_turns(task, sides, mesh, result)
        results[method] = result
    return results


def choice_of(method: str, ranks: int) -> ContextChoice:
    """A method on that many ranks; the hybrid in rows of two."""
    row = {ContextMethod.ULYSSES: ranks, ContextMethod.HYBRID: 2}.get(ContextMethod(method), 1)
    return ContextChoice(ContextMethod(method), row, "measured")


def _sides(task: Task, method: str, mesh: DeviceMesh, silent: DeviceMesh) -> dict[str, Step]:
    """The three sides of a method, once two of them have been seen to agree."""
    sides: dict[str, Step] = {}
    for name, over, overlap in (("compute", silent, True), ("off", mesh, False), ("on", mesh, True)):
        choice = choice_of(method, task.ranks)
        core = ContextAttention(choice, over, LocalAttention(), overlap=overlap, head_portions=task.portions)
        sides[name] = _step(task, core)
    if not all(torch.equal(a, b) for a, b in zip(sides["off"](), sides["on"](), strict=True)):
        raise AssertionError(f"{method}: overlap changes results")
    return sides


def _step(task: Task, core: ContextAttention) -> Step:
    """One layer forward and backward, on this rank's tokens."""
    batch, spec = core.shard(task.batch()), AttentionSpec(scale=task.head_dim**-0.5)
    q, k, v, dout = (x.index_select(0, batch.token_numbers) for x in task.inputs())
    leaves = q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def step() -> list[Tensor]:
        context = core(q, k, v, batch, spec)
        return [context.detach(), *torch.autograd.grad(context, leaves, dout)]

    return step


def _rival(task: Task, mesh: DeviceMesh) -> Step:
    """The other program's Ulysses on the same inputs; it must agree with one process."""
    rank = mesh[Axis.CP].get_local_rank()
    layout = SequenceLayout(LayoutKind.CONTIGUOUS, task.tokens, task.ranks)
    parts = [x.index_select(0, layout.index(rank)) for x in task.inputs()]
    batch, spec = task.batch(), AttentionSpec(scale=task.head_dim**-0.5)
    step = ringmaster_ulysses.build_step(mesh, batch, spec, *parts)
    q, k, v, dout = task.inputs()
    leaves = q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    context = LocalAttention()(q, k, v, batch, spec)
    expected = [context.detach(), *torch.autograd.grad(context, leaves, dout)]
    for ours, theirs in zip(expected, step(), strict=True):
        difference = (ours.index_select(0, layout.index(rank)) - theirs).abs().max().item()
        if not difference <= RIVAL_TOLERANCE[task.dtype] * ours.abs().max().item():
            raise ringmaster_ulysses.CannotRun(f"its results differ from one process's by {difference:.2g}")
    return step


def _sent_bytes(task: Task, choice: ContextChoice) -> float:
    batch, rows = task.batch(), task.ranks // choice.ulysses
    layout = choice.layout(batch.tokens, task.ranks, batch.cu_seqlens)
    hops = travel(layout, batch.cu_seqlens, batch.lengths)
    if choice.method == ContextMethod.ALL_GATHER:
        hops = (rows - 1,) * rows
    shape = {"heads": task.heads, "groups": task.groups, "head_dim": task.head_dim, "dtype": DTYPES[task.dtype]}
    return sum(sent_bytes(choice, local_tokens=layout.local_tokens, hops=hops, **shape))


def _take_turns(task: Task, sides: dict[str, Step], mesh: DeviceMesh, result: MethodResult) -> None:
    group = mesh[Axis.CP].get_group()
    for name, step in sides.items():
        step()  # allocations of a first run are not measured
        result.seconds[name], result.wire_bytes[name] = [], 0
    for _ in range(task.repeats):
        for name, step in sides.items():
            group.barrier().wait()
            before, start = _sent_so_far(task.interface), time.perf_counter()
            step()
            result.seconds[name].append(time.perf_counter() - start)
            group.barrier().wait()
            result.wire_bytes[name] += _sent_so_far(task.interface) - before


def _sent_so_far(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text(encoding="ascii"))


def main(rank: int, folder: Path) -> None:
    """Read the task, run, write what was seen."""
    raw: dict[str, Any] = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    task = Task(**{**raw, "methods": tuple(raw["methods"])})
    seen = run_rank(task, rank, folder / "meeting")
    answer = json.dumps({method: asdict(result) for method, result in seen.items()})
    (folder / f"rank{rank}.json").write_text(answer, encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
