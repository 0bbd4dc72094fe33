"""Whether weights that a run did not save are still those it was trained on.

An adapter's saved state holds what was trained and, of every frozen weight, a digest of some of its numbers. That
tells any other base apart, since training moves nearly every number; it is no check against damage, which would cost
reading every byte (SmolLM2-135M: a second; this: 30 ms).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from freight.errors import CheckpointError

SAMPLES = 1024


def digest(tensor: Tensor) -> str:
    """Of a tensor's shape, dtype and about `SAMPLES` numbers spread over it."""
    flat = tensor.detach().flatten()
    sample = flat[:: max(1, flat.numel() // SAMPLES)].contiguous().cpu().view(torch.uint8)
    facts = f"{list(tensor.shape)} {tensor.dtype}".encode()
    return hashlib.sha256(facts + bytes(sample.numpy())).hexdigest()[:16]


def frozen_digests(model: nn.Module) -> dict[str, str]:
    """Digests of a model's frozen parameters; empty where everything is trained."""
    return {name: digest(tensor) for name, tensor in model.named_parameters() if not tensor.requires_grad}


def check_frozen(found: Mapping[str, str], saved: Mapping[str, str], base: str) -> None:
    """Refuse a base that is not the one of the saved state.

    Args:
        found: Digests of the weights at hand.
        saved: Digests in the saved state; those of names not in `found` are passed over.
        base: Where the weights at hand come from.

    Raises:
        CheckpointError: A weight differs.
    """
    changed = [name for name, value in found.items() if saved.get(name) != value]
    if changed:
        raise CheckpointError(
            f"the weights of `{base}` are not those the adapter was trained on: {changed[0]} differs "
            f"({len(changed)} of {len(found)} do). Put the base of the run back, or set `model.hf` to where it is now."
        )
