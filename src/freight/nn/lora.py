"""A linear module with a low-rank update beside it: peft's layer, computed the way this decoder computes.

    y = W x + b + scale * B A x             W and b frozen; A `[rank, in]`, B `[out, rank]` trained

What differs from peft's own forward: its matrices are `Linear`s of ours (fast bfloat16 on any CPU), dropout is keyed by
(seed, step, microbatch, module, token, feature) instead of a generator's state, so that chunks, ranks and resumed runs
drop the same numbers, and the rows' lengths of DoRA stay float32 whatever the rest computes in.

Importing peft takes seconds: this module is imported only by those who build an adapter.
"""

from __future__ import annotations

import hashlib
from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from freight.nn.linear import Linear
from freight.ops.batch import TokenRange
from freight.ops.dropout import keep_mask, scaled_keep
from freight.ops.linear import matmul_float32

ADAPTER = "default"  # peft's name for the one adapter of a model; part of parameter names


class LoraLinear(nn.Module, LoraLayer):
    """Stands in for a `Linear`; made by peft's injection.

    Args:
        base_layer: The frozen module.
        adapter_name: peft's name of the adapter.
        config: Of the adapter.
        r: Rank.
        lora_alpha: Numerator of the scale.
        target_name: Full name of the module, which tells its dropout from that of others.
        **kwargs: What else peft passes.
    """

    def __init__(
        self,
        base_layer: Linear,
        adapter_name: str,
        config: LoraConfig,
        r: int,
        lora_alpha: int,
        target_name: str,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self.fan_in_fan_out = False
        self.dropout = InputDropout(target_name, config.lora_dropout) if config.lora_dropout else None
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)
        self.lora_A[adapter_name] = Linear(base_layer.in_features, r, bias=False)
        self.lora_B[adapter_name] = Linear(r, base_layer.out_features, bias=False)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What peft may ask of this layer beyond plain LoRA."""
        return {(): None, ("use_dora",): _Dora}

    def forward(self, x: Tensor, tokens: TokenRange | None = None) -> Tensor:
        """`[tokens, in]` -> `[tokens, out]`.

        Args:
            x: Hidden states.
            tokens: Which tokens they are; needed where dropout is on.
        """
        frozen, magnitude = self.frozen, self.magnitude
        base = frozen(x, tokens)
        if self.training and self.dropout is not None:
            assert tokens is not None
            x = x * self.dropout.factors(tokens, x)  # pyright: ignore[reportAttributeAccessIssue] (decorator hides it)
        update = self.b(self.a(x)) * self.scale
        if magnitude is None:
            return base + update
        factor = magnitude(row_norms(frozen.weight, self.a.weight, self.b.weight, self.scale))
        product = base if frozen.bias is None else base - frozen.bias
        return base + (factor - 1).to(base.dtype) * product + factor.to(base.dtype) * update

    @property
    def frozen(self) -> Linear:
        """The frozen module."""
        return cast(Linear, self.base_layer)

    @property
    def a(self) -> Linear:
        """A, `[rank, in]`."""
        return cast(Linear, self.lora_A[ADAPTER])

    @property
    def b(self) -> Linear:
        """B, `[out, rank]`."""
        return cast(Linear, self.lora_B[ADAPTER])

    @property
    def scale(self) -> float:
        """Factor on `B A`."""
        return self.scaling[ADAPTER]

    @property
    def magnitude(self) -> Magnitude | None:
        """DoRA's lengths of the rows."""
        return cast(Magnitude, self.lora_magnitude_vector[ADAPTER]) if self.lora_magnitude_vector else None


class Magnitude(nn.Module):
    """Lengths of the rows of a weight; sharded apart from A and B, because bfloat16 would round them by 0.4 %.

    Args:
        rows: Outputs of the weight.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows))

    def forward(self, norms: Tensor) -> Tensor:
        """Lengths of the updated weight's rows `[rows]` -> factors that give them the trained lengths."""
        return self.weight / norms


class _Dora:
    """Tells peft that the layer has the rows' lengths as parameters; the arithmetic stands in `LoraLinear.forward`."""

    @staticmethod
    def init(module: LoraLinear, adapter_name: str, **_: Any) -> None:
        """Add them."""
        module.lora_magnitude_vector[adapter_name] = Magnitude(module.frozen.out_features)


@torch.no_grad()
def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Lengths of the rows of `weight + scale * b @ a`, without making that matrix.

    `|w + s b A|^2 = |w|^2 + 2 s b . (A w) + s^2 b (A A^T) b^T`, row by row: one GEMM of rank columns.

    Args:
        weight: `[out, in]`.
        a: `[rank, in]`.
        b: `[out, rank]`.
        scale: Factor on the product.

    Returns:
        `[out]`, float32 (float64 for float64). DoRA holds them constant in backward.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    scaled = scale * b.to(wide)
    cross = matmul_float32(weight, a.t()).to(wide)  # [out, rank]
    inner = scaled @ matmul_float32(a, a.t()).to(wide)  # [out, rank]
    return (squares + (scaled * (2 * cross + inner)).sum(1)).sqrt()


class InputDropout:
    """What dropout multiplies the inputs of one module by. An object, so that compiled layers share one program.

    Args:
        name: Of the module, which tells it from others.
        rate: Share dropped.
    """

    def __init__(self, name: str, rate: float) -> None:
        self.site = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        self.rate = rate

    @torch.compiler.disable  # the step's number is part of the key: compiled, every step would be another program
    def factors(self, tokens: TokenRange, like: Tensor) -> Tensor:
        """0 where dropped, else `1 / (1 - rate)`.

        Args:
            tokens: Rows of the inputs, counted by their numbers in the whole stream.
            like: `[tokens, features]`, for features, dtype and device.
        """
        batch, device = tokens.batch, like.device
        rows = tokens.token_numbers
        columns = torch.arange(like.shape[1], device=device)
        keep = keep_mask((batch.seed, batch.step, batch.microbatch, self.site), rows, columns, self.rate)
        return scaled_keep(keep, self.rate, like.dtype)
