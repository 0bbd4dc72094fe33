"""What a run leaves to be compared: the same form from the ranks and from the reference, in the order of execution.

Values of a token are kept whole over ranks, by the token's number in its stream. So where a token was computed, and in
chunks of what size, has no influence on where its values stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

INTEGERS = ("input_ids", "position_ids", "labels")


@dataclass
class StepTrace:
    """One optimizer step.

    Args:
        num_targets: Labels of the global batch.
        loss: Mean over them.
        gradients: Whole, before clipping, by parameter name.
        norm: Of all of them.
        coefficient: That clipping multiplied them by.
        parameters: Whole, after the update.
    """

    num_targets: int
    loss: float
    gradients: dict[str, Tensor]
    norm: float
    coefficient: float
    parameters: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Trace:
    """Three steps, and what was seen inside.

    Args:
        tokens: Of the real tokens of a stream (labels: of all), by (step, microbatch) and name: integers of every step;
            of the first step also what goes in and out of attention and of blocks, in forward's order.
        losses: Of each token in evaluation, by microbatch of the first step; 0 where there is no label.
        steps: Three.
    """

    tokens: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    steps: list[StepTrace] = field(default_factory=list)


@dataclass
class RankTrace:
    """What one rank saw: pieces of streams, and steps whose tensors are whole.

    Args:
        pieces: `(step, microbatch, name) -> [(token numbers, values)]`.
        losses: `(microbatch, perturbed document or None) -> [(token numbers, losses)]`.
        drawn: Weights that differ from those one process draws, by name.
        steps: Tensors only from rank 0.
    """

    pieces: dict[tuple[int, int, str], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    losses: dict[tuple[int, int | None], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)


def joined(
    ranks: Iterable[RankTrace], numbers: Mapping[tuple[int, int], Tensor], streams: Mapping[tuple[int, int], int]
) -> Trace:
    """One trace of the traces of all ranks.

    Args:
        ranks: In order.
        numbers: int64, the real tokens of every stream by (step, microbatch).
        streams: Tokens of every stream, padding included.
    """
    ranks = list(ranks)
    trace = Trace(steps=ranks[0].steps)
    for place, wanted in numbers.items():
        names = dict.fromkeys(name for rank in ranks for step, batch, name in rank.pieces if (step, batch) == place)
        found = {name: [p for rank in ranks for p in rank.pieces.get((*place, name), ())] for name in names}
        everywhere = torch.arange(streams[place])
        trace.tokens[place] = {
            name: gathered(pieces, everywhere if name == "labels" else wanted) for name, pieces in found.items()
        }
    trace.losses = whole_losses(ranks, numbers, None)
    return trace


def whole_losses(
    ranks: Iterable[RankTrace], numbers: Mapping[tuple[int, int], Tensor], perturbed: int | None
) -> dict[int, Tensor]:
    """Losses of the real tokens of the first step's microbatches.

    Args:
        ranks: All.
        numbers: As in `joined`.
        perturbed: Which of the evaluations.
    """
    pieces: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for rank in ranks:
        for (microbatch, document), found in rank.losses.items():
            if document == perturbed:
                pieces.setdefault(microbatch, []).extend(found)
    return {microbatch: gathered(found, numbers[0, microbatch]) for microbatch, found in sorted(pieces.items())}


def gathered(pieces: list[tuple[Tensor, Tensor]], wanted: Tensor) -> Tensor:
    """Values of the wanted tokens in order; nan (or -1) where no rank had one, which no comparison forgives.

    Args:
        pieces: `(token numbers, values)`.
        wanted: int64, token numbers.
    """
    numbers = torch.cat([number for number, _ in pieces])
    values = torch.cat([value for _, value in pieces])
    size = max(int(found.amax()) for found in (numbers, wanted) if len(found)) + 1
    whole = values.new_full((size, *values.shape[1:]), float("nan") if values.is_floating_point() else -1)
    whole[numbers] = values
    return whole[wanted]


class Item(NamedTuple):
    """One tensor to compare.

    Args:
        claim: What it is a part of.
        name: With step and microbatch.
        key: Without them.
        value: A tensor; numbers have no dims.
    """

    claim: str
    name: str
    key: str
    value: Tensor


def in_order(trace: Trace) -> Iterator[Item]:
    """Everything of a trace that is compared with the reference, in the order of execution.

    Gradients of a step come in the order of backward: the last parameter of the model first.
    """
    for number, step in enumerate(trace.steps):
        at = f"step {number}"
        for (of_step, microbatch), values in sorted(trace.tokens.items()):
            if of_step == number:
                for key, value in values.items():
                    claim = "token ids, positions, labels" if key in INTEGERS else "inside the layers"
                    yield Item(claim, f"{key} of {at}, microbatch {microbatch}", key, value)
        yield Item("token count", f"token count of {at}", "token count", torch.tensor(step.num_targets))
        yield Item("loss", f"loss of {at}", "loss", torch.tensor(step.loss, dtype=torch.float64))
        for key in reversed(step.gradients):
            yield Item("gradients", f"gradient of {key} in {at}", key, step.gradients[key])
        yield Item("grad norm", f"grad norm of {at}", "grad norm", torch.tensor(step.norm, dtype=torch.float64))
        coefficient = torch.tensor(step.coefficient, dtype=torch.float64)
        yield Item("clip coefficient", f"clip coefficient of {at}", "clip coefficient", coefficient)
        for key, value in step.parameters.items():
            yield Item("parameters", f"parameter {key} after {at}", key, value)
