"""The plain run that everything is compared with: one process, float64, one document at a time, no schedule at all.

Labels, sums over the global batch, the gradient norm, clipping and AdamW are written out here once more, so that no
line that the ranks execute is also the judge of what they compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.config.data_checks import pack_size
from freight.config.schema import OptimizerConfig
from freight.data.pack.rows import Row
from freight.ops.batch import IGNORE_INDEX
from freight.verify.case import STEPS, Case, Start
from freight.verify.reference_decoder import Placed, PlainDecoder
from freight.verify.trace import StepTrace, Trace

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Stream:
    """The documents of one microbatch.

    Args:
        step: Optimizer step.
        microbatch: Its number in the step.
        documents: Where each stands; dropout on.
        tokens: Of the stream, padding included.
    """

    step: int
    microbatch: int
    documents: tuple[Placed, ...]
    tokens: int

    @property
    def numbers(self) -> Tensor:
        """int64: the real tokens."""
        return torch.cat([document.numbers for document in self.documents] or [torch.arange(0)])


def streams(case: Case) -> list[Stream]:
    """Which documents make which microbatch: row i of a step belongs to data rank `i % ranks`, rows of a rank in turn.

    Rows are taken as packing gives them; which tokens are labels and where documents stand is worked out here.
    """
    rows = case.rows()
    total, found = rows.rows_in(0, 0), []
    for step in range(STEPS):
        taken = [divmod(step * case.rows_per_step + i, total) for i in range(case.rows_per_step)]
        of_step = [rows.row(epoch, 0, number) for epoch, number in taken]
        slots = -(-len(of_step) // case.data_ranks)
        for first in range(0, slots, case.rows_per_microbatch):
            for rank in range(case.data_ranks):
                mine = of_step[rank :: case.data_ranks][first : first + case.rows_per_microbatch]
                number = first // case.rows_per_microbatch * case.data_ranks + rank
                drop = (case.config.train.seed, step, number)
                found.append(Stream(step, number, *_placed(case, mine, drop)))
    return found


def _placed(case: Case, rows: list[Row], drop: tuple[int, int, int]) -> tuple[tuple[Placed, ...], int]:
    """The documents of some rows, and the tokens of the stream that they stand in."""
    size = pack_size(case.config.data)
    multiple = case.config.data.packing.document_multiple if case.config.data.packing else 1
    placed, start = [], 0
    for number, row in enumerate(rows):
        start = number * size if case.pad_rows else start
        first = 0
        for length, tail in zip(row.lengths.tolist(), row.tail_labels.tolist(), strict=True):
            ids, targets = row.ids[first : first + length].tolist(), row.loss_mask[first : first + length].tolist()
            labels = [ids[i + 1] if targets[i + 1] else IGNORE_INDEX for i in range(length - 1)]
            labels.append(tail if tail >= 0 else IGNORE_INDEX)
            placed.append(Placed(torch.tensor(ids), torch.tensor(labels), start, drop))
            start += math.ceil(length / multiple) * multiple
            first += length
    return tuple(placed), case.rows_per_microbatch * size if case.pad_rows else start or multiple


def run_reference(case: Case, start: Start, progress: Callable[[int, int, str], None]) -> Trace:
    """Three steps.

    Args:
        case: What to run.
        start: The weights to start from.
        progress: Draws `(done, total, what)`.
    """
    trace, found = Trace(), streams(case)
    weights = {name: value.double() for name, value in start.weights.items()}
    adam = Adam(case.config.train.optimizer)
    for stream in found:
        trace.tokens[stream.step, stream.microbatch] = _integers(stream)
    for step in range(STEPS):
        progress(step, STEPS, "reference")
        mine = [stream for stream in found if stream.step == step]
        if step == 0:
            trace.losses = {stream.microbatch: _evaluated(case, weights, stream) for stream in mine}
        gradients, loss, targets = _gradients(case, weights, start.trained, mine, trace if step == 0 else None)
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        limit = case.config.train.grad_clip
        coefficient = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        if targets:
            weights |= adam.updated(weights, {name: g * coefficient for name, g in gradients.items()})
        trace.steps.append(
            StepTrace(targets, loss, gradients, norm, coefficient, {name: weights[name] for name in gradients})
        )
    progress(STEPS, STEPS, "reference")
    return trace


def _integers(stream: Stream) -> dict[str, Tensor]:
    empty = [torch.arange(0)]
    labels = torch.full((stream.tokens,), IGNORE_INDEX)
    for document in stream.documents:
        labels[document.numbers] = document.labels
    return {
        "input_ids": torch.cat([document.ids for document in stream.documents] or empty),
        "position_ids": torch.cat([torch.arange(len(document.ids)) for document in stream.documents] or empty),
        "labels": labels,
    }


def _gradients(
    case: Case, weights: Weights, trained: frozenset[str], found: list[Stream], trace: Trace | None
) -> tuple[Weights, float, int]:
    """Gradients of the whole global batch, its mean loss and its labels; what is seen inside goes to `trace`."""
    leaves = {name: value.clone().requires_grad_(name in trained) for name, value in weights.items()}
    model = PlainDecoder(case.arch, case.config.adapter, leaves)
    targets = sum(int((document.labels != IGNORE_INDEX).sum()) for stream in found for document in stream.documents)
    asked = [name for name in leaves if name in trained]
    sums = {name: torch.zeros_like(weights[name]) for name in asked}
    total = 0.0
    for stream in found:
        seen: dict[str, list[Tensor]] = {}
        for document in stream.documents:
            objective, nll = model.losses(
                document,
                case.config.train,
                lambda name, value: seen.setdefault(name, []).append(value.detach()),  # noqa: B023
            )
            total += float(nll.detach().sum())
            found_here = torch.autograd.grad(
                objective.sum() / max(targets, 1), [leaves[name] for name in asked], allow_unused=True
            )
            for name, gradient in zip(asked, found_here, strict=True):
                if gradient is not None:
                    sums[name] += gradient
        if trace is not None:
            values = {name: torch.cat(parts) for name, parts in seen.items()}
            trace.tokens[stream.step, stream.microbatch] |= values
    return sums, total / targets if targets else math.nan, targets


@torch.no_grad()
def _evaluated(case: Case, weights: Weights, stream: Stream) -> Tensor:
    """Loss of every token without dropout."""
    model = PlainDecoder(case.arch, case.config.adapter, weights)
    losses = [
        model.losses(replace(document, drop=None), case.config.train, lambda *_: None)[1]
        for document in stream.documents
    ]
    return torch.cat(losses or [torch.zeros(0, dtype=torch.float64)])


class Adam:
    """AdamW as its paper has it; decay on weights of two or more dims.

    **Source**: arXiv 1711.05101, Algorithm 2.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self._means: Weights = {}
        self._squares: Weights = {}
        self._updates = 0

    def updated(self, weights: Weights, gradients: Weights) -> Weights:
        """New values of the weights that have a gradient."""
        config, (first, second) = self._config, self._config.betas
        self._updates += 1
        changed = {}
        for name, g in gradients.items():
            mean = self._means.get(name, torch.zeros_like(g)) * first + (1 - first) * g
            square = self._squares.get(name, torch.zeros_like(g)) * second + (1 - second) * g**2
            self._means[name], self._squares[name] = mean, square
            step = (mean / (1 - first**self._updates)) / (torch.sqrt(square / (1 - second**self._updates)) + config.eps)
            decay = config.weight_decay if g.ndim >= 2 else 0.0
            changed[name] = weights[name] - config.lr * (step + decay * weights[name])
        return changed
