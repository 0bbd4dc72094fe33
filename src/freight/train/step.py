"""One optimizer step: sums over the whole global batch, divided once by its number of labels.

The count is known from integers before the first forward, so accumulation, data ranks and short last windows need no
correction of any kind. The device is read once per step: loss and gradient norm decide together whether to update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from freight.ops.batch import TokenBatch
from freight.ops.protocols import LossSums
from freight.parallel.data import set_last_microbatch
from freight.parallel.gradients import global_grad_norm, scale_gradients, sum_over_batches, sum_over_data


@dataclass(frozen=True)
class StepResult:
    """What a step computed.

    Args:
        loss: Mean negative log-likelihood over the labels of the global batch; nan if it has none.
        grad_norm: Global norm before clipping; nan if nothing was computed.
        num_targets: Labels of the global batch.
        updated: Whether parameters, optimizer and schedule advanced.
        num_tokens: Real tokens of the global batch.
    """

    loss: float
    grad_norm: float
    num_targets: int
    updated: bool
    num_tokens: int = 0


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    microbatches: Sequence[TokenBatch],
    num_targets: int,
    *,
    num_tokens: int = 0,
    learning_rate: float,
    grad_clip: float | None,
    mesh: DeviceMesh,
    device: torch.device,
) -> StepResult:
    """Forward, backward, clip and update on one global batch.

    Args:
        model: `model(batch) -> LossSums`.
        optimizer: Its groups all take `learning_rate`.
        microbatches: This rank's part of the global batch; at least one, fillers included.
        num_targets: Labels in this data rank's microbatches, over all its context ranks.
        num_tokens: Real tokens in them, likewise.
        learning_rate: For this update.
        grad_clip: Largest global norm; None = no clipping.
        mesh: Of `build_mesh`.
        device: Where the model computes.

    Returns:
        The step's numbers, equal on all ranks. Without labels or with a non-finite norm nothing is updated and
        gradients are cleared.

    **Communication**: an all-reduce of two counts over the batch axis, of one scalar for the loss and one for the norm
    over data and context, and the gradients' reduce-scatter in the last microbatch.
    """
    count, tokens = num_targets, num_tokens
    if mesh.size() > 1:
        count, tokens = sum_over_batches(torch.tensor([count, tokens], device=device), mesh).tolist()
    if count == 0:
        return StepResult(math.nan, math.nan, 0, updated=False, num_tokens=tokens)
    nll = torch.zeros((), device=device)
    for index, batch in enumerate(microbatches):
        set_last_microbatch(model, index == len(microbatches) - 1)
        sums: LossSums = model(batch.to(device, non_blocking=True))
        (sums.objective / count).backward()
        nll = nll + sums.nll.detach()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = global_grad_norm(parameters)
    loss, norm = torch.stack([(sum_over_data(nll, mesh) / count).to(norm), norm]).tolist()
    updated = math.isfinite(norm)
    if updated:
        if grad_clip is not None and (coefficient := grad_clip / (norm + 1e-6)) < 1:
            scale_gradients(parameters, coefficient)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, norm, count, updated, tokens)
