"""Data parallelism on FSDP2: sharded float32 masters, gathered in the compute dtype, gradients summed in float32.

Within a step parameters stay gathered and gradients are accumulated locally in float32; the last microbatch's backward
reduces and frees. For n parameters on d ranks that keeps `2n + 4n + 12n/d` bytes with bf16 compute. On one rank it is
the cheapest choice in time: each parameter is cast once per step, where freeing after every block would cast it twice
per microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from freight.parallel.mesh import data_axis

Precision = Literal["bf16", "fp32", "fp64"]
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    precision: Precision,
    uncast: Iterable[nn.Module] = (),
) -> None:
    """Wrap every block, then the root, which keeps what is in no block (embedding, final norm, head).

    Frozen parameters stay as they are: whole on every rank, in their own dtype, never communicated. Within a step all
    parameters are gathered anyway, so a shard of them would come on top of the whole.

    Args:
        model: Module whose trained parameters all have the dtype of the masters; may be on the meta device.
        blocks: Modules gathered and reduced as one unit each.
        mesh: Of `build_mesh`.
        precision: dtype of forward and backward. `fp64` is for verification; masters are then float64.
        uncast: Modules whose parameters compute in the masters' dtype; each is a unit of its own.

    **Communication**: none here. Per step and rank of d: all-gather of the parameters (d-1)/d, reduce-scatter of the
    gradients the same, in float32.
    **Gradient**: summed over the data axis, never divided; losses are divided by the global label count beforehand.
    """
    reduce_dtype = torch.float64 if precision == "fp64" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES[precision], reduce_dtype=reduce_dtype)
    axis = data_axis(mesh)
    exact = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    for module, of_module in (*((m, exact) for m in uncast), *((m, policy) for m in (*blocks, model))):
        fully_shard(module, mesh=axis, mp_policy=of_module, reshard_after_forward=False, ignored_params=frozen or None)
    for module in _fsdp_modules(model):
        module.set_force_sum_reduction_for_comms(True)
        # On one rank the default factor is 1 already, and naming it would cost a division of every gradient.
        if axis.size() > 1:
            module.set_gradient_divide_factor(1.0)


def set_last_microbatch(model: nn.Module, last: bool) -> None:
    """Say before a forward whether its backward ends the step: only then are gradients reduced, parameters freed."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def free_gathered(model: nn.Module) -> None:
    """Drop gathered copies after forwards without backward, so that the next gather sees the masters as they are."""
    for module in _fsdp_modules(model):
        module.reshard()


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


@torch.no_grad()
def fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole tensor into a parameter, converting its dtype once.

    Args:
        parameter: Plain or sharded.
        whole: The full tensor, of any dtype, the same on all ranks.
    """
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    part = whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    parameter.to_local().copy_(part)


def whole(parameter: Tensor) -> Tensor:
    """The full tensor of a parameter, without a graph.

    **Communication**: an all-gather of the tensor over the axes it is split on.
    """
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
