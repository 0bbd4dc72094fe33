"""What a rank does: the real model, execution, loader, optimizer and step, watched from outside.

Nothing is computed here. The blocks' parts are wrapped so that what goes in and out of them is noted by token number,
and the step's gradients are noted where the step asks for their norm.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from freight.assemble.build import build_model
from freight.assemble.execution import Execution, build_execution
from freight.nn.decoder import Decoder
from freight.nn.loss_head import TokenLossHead
from freight.ops.batch import TokenBatch, TokenRange
from freight.parallel.data import fill, free_gathered, whole
from freight.parallel.mesh import DeviceMesh, batch_axis, build_mesh
from freight.planner.execution import resolve_execution
from freight.train import step
from freight.train.optimizer import build_optimizer
from freight.verify.case import STEPS, Case, Start, moved
from freight.verify.sabotage import sabotaged
from freight.verify.trace import INTEGERS, RankTrace, StepTrace


@dataclass(frozen=True)
class Job:
    """One run on all ranks.

    Args:
        case: What to run.
        drawn: The weights that one process draws; the run starts from them after `moved`.
        perturbed: Document of the first step's first microbatch that is replaced in a second evaluation; None = none.
        look_inside: Whether to note tokens and losses beside steps.
    """

    case: Case
    drawn: Start
    perturbed: int | None = None
    look_inside: bool = True


def run_jobs(jobs: list[Job], sabotage: str | None) -> list[RankTrace]:
    """Run on this rank of a default process group.

    Args:
        jobs: The same on all ranks, one after another; all on the same mesh.
        sabotage: Name of a fault to run with; None = none.
    """
    first = jobs[0].case
    if first.device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    with sabotaged(sabotage):
        mesh = build_mesh(first.world, first.device, context=first.context_ranks)
        return [_run(job, mesh) for job in jobs]


def _run(job: Job, mesh: DeviceMesh) -> RankTrace:
    case, trace = job.case, RankTrace()
    config, device = case.config, torch.device(case.device)
    loader = case.loader(batch_axis(mesh).get_local_rank())
    data = list(loader)
    plan = resolve_execution(config, case.arch, case.microbatch_tokens, world_size=case.world, precision=case.dtype)
    with build_execution(plan, config, case.arch, mesh, device) as execution:
        model = build_model(case.arch, config, mesh, execution=execution, precision=case.dtype)
        trace.drawn = _differing(model, job.drawn)
        for name, parameter in model.named_parameters():
            fill(parameter, moved(job.drawn).weights[name])
        if job.look_inside:
            first = data[0].microbatches
            _evaluate(model, first, execution, device, trace, None)
            if job.perturbed is not None:
                changed = [_perturbed(batch, job.perturbed) for batch in first]
                _evaluate(model, changed, execution, device, trace, job.perturbed)
        optimizer = build_optimizer(model, config.train.optimizer)
        watch = _Watch(model, trace)
        for number in range(STEPS):
            mine = [execution.deal(batch) for batch in data[number].microbatches]
            if job.look_inside:
                _note_integers(mine, trace)
            with watch.gradients(optimizer), watch.blocks(mine if number == 0 and job.look_inside else []):
                result = step.train_step(
                    model,
                    optimizer,
                    mine,
                    data[number].num_targets,
                    num_tokens=data[number].num_tokens,
                    learning_rate=config.train.optimizer.lr,
                    grad_clip=config.train.grad_clip,
                    mesh=mesh,
                    device=device,
                )
            trace.steps.append(watch.step(result))
        return trace


def _differing(model: Decoder, drawn: Start) -> list[str]:
    """Trained weights that are not bit for bit those one process draws; lengths of DoRA are computed, not drawn."""
    return [
        name
        for name, parameter in model.named_parameters()
        if name in drawn.trained
        and "magnitude" not in name
        and not torch.equal(whole(parameter).cpu().float(), drawn.weights[name])
    ]


def _perturbed(batch: TokenBatch, document: int) -> TokenBatch:
    """The same microbatch with other token ids in one document; labels stay."""
    spans = batch.spans
    if document >= len(spans):
        return batch
    start, length = spans[document]
    ids = batch.input_ids.clone()
    ids[start : start + length] = (ids[start : start + length] + 1) % 2
    return replace(batch, input_ids=ids, _cache=OrderedDict())


@torch.no_grad()
def _evaluate(
    model: Decoder,
    batches: list[TokenBatch],
    execution: Execution,
    device: torch.device,
    trace: RankTrace,
    perturbed: int | None,
) -> None:
    """Losses of every token, without dropout."""
    model.eval()
    for batch in map(execution.deal, batches):
        losses = model(batch.to(device), TokenLossHead(7, model.arch.final_softcap))
        trace.losses.setdefault((batch.microbatch, perturbed), []).append((batch.token_numbers, losses.cpu()))
    free_gathered(model)
    model.train()


def _note_integers(batches: list[TokenBatch], trace: RankTrace) -> None:
    for batch in batches:
        for name in INTEGERS:
            pieces = trace.pieces.setdefault((batch.step, batch.microbatch, name), [])
            pieces.append((batch.token_numbers, getattr(batch, name)))


class _Watch:
    """Notes what a step does, without changing it."""

    def __init__(self, model: Decoder, trace: RankTrace) -> None:
        self._model, self._trace = model, trace
        self._gradients: dict[str, Tensor] = {}
        self._clipped = 0.0
        self._seen: set[tuple[int, str, int]] = set()

    @contextmanager
    def gradients(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Whole gradients before clipping, where the step asks for their norm, and how far clipping scaled them."""
        asked = step.global_grad_norm

        def norm(parameters: Any) -> Tensor:
            self._gradients = self._whole_gradients()
            return asked(parameters)

        def before_update(*_: Any) -> None:
            self._clipped = _norm(self._whole_gradients())

        self._clipped = 0.0
        hook = optimizer.register_step_pre_hook(before_update)
        try:
            with mock.patch.object(step, "global_grad_norm", norm):
                yield
        finally:
            hook.remove()

    def step(self, result: step.StepResult) -> StepTrace:
        """What the step that has just ended left."""
        own = _norm(self._gradients)
        coefficient = self._clipped / own if result.updated and own else 1.0
        parameters = {
            name: whole(parameter).to("cpu", copy=True)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }
        return StepTrace(result.num_targets, result.loss, self._gradients, result.grad_norm, coefficient, parameters)

    def _whole_gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                grad = parameter.grad
                found[name] = torch.zeros(parameter.shape) if grad is None else whole(grad).to("cpu", copy=True)
        return found

    @contextmanager
    def blocks(self, batches: list[TokenBatch]) -> Iterator[None]:
        """Inputs and outputs of every block's `pre` and `post`, for these microbatches."""
        if not batches:
            yield
            return
        for number, block in enumerate(self._model.blocks):
            block.pre = self._watched_pre(f"layers.{number}", block.pre)  # pyright: ignore[reportAttributeAccessIssue]
            block.post = self._watched_post(f"layers.{number}", block.post)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            for block in self._model.blocks:
                del block.pre, block.post

    def _watched_pre(self, name: str, pre: Callable[..., Any]) -> Callable[..., Any]:
        def watched(hidden: Tensor, tokens: TokenRange) -> Any:
            parts = pre(hidden, tokens)
            self._note(f"{name}.input", tokens, hidden)
            for part, value in zip("qkv", parts, strict=True):
                self._note(f"{name}.attention.{part}", tokens, value)
            return parts

        return watched

    def _watched_post(self, name: str, post: Callable[..., Any]) -> Callable[..., Any]:
        def watched(hidden: Tensor, context: Tensor, tokens: TokenRange) -> Tensor:
            output = post(hidden, context, tokens)
            self._note(f"{name}.attention.context", tokens, context)
            self._note(f"{name}.output", tokens, output)
            return output

        return watched

    @torch.no_grad()
    def _note(self, name: str, tokens: TokenRange, value: Tensor) -> None:
        """The first time only: what a runner computes again is what it computed before."""
        numbers, batch = tokens.token_numbers.cpu(), tokens.batch
        if not len(numbers) or (batch.microbatch, name, int(numbers[0])) in self._seen:
            return
        self._seen.add((batch.microbatch, name, int(numbers[0])))
        pieces = self._trace.pieces.setdefault((batch.step, batch.microbatch, name), [])
        pieces.append((numbers, value.detach().to("cpu", torch.float64, copy=True)))


def _norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([(g.double() ** 2).sum() for g in gradients.values()]).sum().sqrt()) if gradients else 0.0
