"""Ulysses of the package axolotl-ringmaster, where it is installed: the other side of the context benchmark.

It is called as its own users call it: `setup` installs a runtime and registers an attention function with transformers,
which wraps torch's `scaled_dot_product_attention`. Nothing is installed for it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch import Tensor

from freight.ops.batch import TokenBatch
from freight.ops.protocols import AttentionSpec
from freight.parallel.mesh import Axis, DeviceMesh

PACKAGE = "axolotl-ringmaster"


class CannotRun(RuntimeError):
    """Why it is not measured."""


def version() -> str | None:
    """Of the installed package."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def build_step(
    mesh: DeviceMesh, batch: TokenBatch, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Callable[[], list[Tensor]]:
    """One layer forward and backward.

    Args:
        mesh: With a context axis.
        batch: The whole stream.
        spec: Scale.
        q: `[tokens, heads, head_dim]`, this rank's piece of a contiguous layout.
        k: `[tokens, groups, head_dim]`.
        v: Like k.
        dout: Gradient of the context, like q.

    Returns:
        A function that gives the context and the gradients of q, k and v, all `[tokens, heads, head_dim]`.

    Raises:
        CannotRun: The package is missing, or refuses these shapes.
    """
    if find_spec("ringmaster") is None:
        raise CannotRun(f"{PACKAGE} is not installed")
    import ringmaster  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    from transformers import AttentionInterface  # noqa: PLC0415

    ranks, groups = mesh[Axis.CP].size(), k.shape[1]
    config = ringmaster.RingmasterConfig(
        size=ranks, backend=ringmaster.Backend.ULYSSES, ulysses_size=ranks, ring_size=1
    )
    try:
        runtime = ringmaster.setup(
            config, num_kv_heads=groups, device_mesh=mesh, cp_dim=Axis.CP, device_type="cpu", inner_attn="sdpa"
        )
    except ValueError as error:
        raise CannotRun(str(error)) from error
    if len(batch.lengths) > 1:
        runtime.varlen = torch.tensor(batch.cu_seqlens, dtype=torch.int32), max(batch.lengths)
    attention = AttentionInterface()[runtime.attn_implementation]
    module = SimpleNamespace(
        is_causal=True, num_key_value_groups=q.shape[1] // groups, config=SimpleNamespace(_attn_implementation="sdpa")
    )
    # [tokens, heads, d] -> [1, heads, tokens, d]
    leaves = [x.detach().transpose(0, 1).unsqueeze(0).contiguous().requires_grad_() for x in (q, k, v)]

    def step() -> list[Tensor]:
        context, _ = attention(module, *leaves, None, scaling=spec.scale, is_causal=True)  # [1, tokens, heads, d]
        grads = torch.autograd.grad(context, leaves, dout.unsqueeze(0))
        return [context.detach()[0], *(grad[0].transpose(0, 1) for grad in grads)]

    try:
        step()
    except (ValueError, NotImplementedError) as error:
        raise CannotRun(str(error)) from error
    return step
