"""Attention against torch's own `scaled_dot_product_attention`: one forward and one backward, ratio of medians.

Four shapes: many short documents of one length (torch gets them as a batch), documents of chat-like lengths packed in
one row (torch gets one call per document), and one long document twice. A ratio above 1 means that Freight is faster.
Both sides hold the same values; each keeps them in the memory order that is natural to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from freight.bench.options import chosen_options
from freight.bench.timing import alternating_medians
from freight.errors import ConfigError
from freight.ops.attention import LocalAttention
from freight.ops.batch import TokenBatch
from freight.ops.protocols import AttentionSpec

HEADS = 8
HEAD_DIM = 64
ROW_TOKENS = 8192

# Lengths of the demo's conversations: functions of the standard library with docstrings.
MEAN_TOKENS = 271
MEDIAN_TOKENS = 182
LONGEST_TOKENS = 3800


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the four shapes.

    Args:
        options: `repeats` (default 5; fewer where a run takes long), `dtype` (`bf16` or `fp32`), `device` (`cpu` or
            `cuda`).

    Returns:
        `ratio_packed_64`, `ratio_packed_mixed`, `ratio_2048`, `ratio_8192`: torch's time over Freight's, and the
        milliseconds behind them.

    Raises:
        ConfigError: An option that does not exist.
    """
    chosen = chosen_options(options, {"repeats": 5, "dtype": "bf16", "device": "cpu"})
    if chosen["dtype"] not in ("bf16", "fp32") or chosen["device"] not in ("cpu", "cuda"):
        raise ConfigError(
            f"`dtype` is bf16 or fp32 and `device` cpu or cuda; got {chosen['dtype']}, {chosen['device']}."
        )
    dtype = torch.bfloat16 if chosen["dtype"] == "bf16" else torch.float32
    device = torch.device(chosen["device"])
    shapes = {"packed_64": [64] * 32, "packed_mixed": mixed_lengths(), "2048": [2048], "8192": [8192]}
    result: dict[str, Any] = {"benchmark": "attention", **chosen, "threads": torch.get_num_threads()}
    for name, lengths in shapes.items():
        seconds = _measure(lengths, dtype, device, int(chosen["repeats"]))
        result[f"ratio_{name}"] = round(seconds["torch"] / seconds["freight"], 3)
        result[f"torch_{name}_milliseconds"] = round(1e3 * seconds["torch"], 2)
        result[f"freight_{name}_milliseconds"] = round(1e3 * seconds["freight"], 2)
    return result


def mixed_lengths(row_tokens: int = ROW_TOKENS, seed: int = 0) -> list[int]:
    """Lognormal lengths with the demo's mean and median, that fill one row; the last is cut to fit."""
    sigma = (2 * np.log(MEAN_TOKENS / MEDIAN_TOKENS)) ** 0.5
    generator = np.random.default_rng(seed)
    lengths: list[int] = []
    left = row_tokens
    while left:
        drawn = int(np.clip(generator.lognormal(np.log(MEDIAN_TOKENS), sigma), 1, LONGEST_TOKENS))
        lengths.append(min(drawn, left))
        left -= lengths[-1]
    return lengths


def _measure(lengths: list[int], dtype: torch.dtype, device: torch.device, repeats: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lengths), HEADS, HEAD_DIM)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    sides = {"torch": _torch_side(lengths, q, k, v, grad), "freight": _freight_side(lengths, q, k, v, grad)}
    wait = torch.cuda.synchronize if device.type == "cuda" else None
    return alternating_medians(sides, repeats=repeats, wait=wait)


def _freight_side(lengths: list[int], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Callable[[], object]:
    batch = TokenBatch.from_documents([[0] * length for length in lengths]).to(q.device)
    core, spec = LocalAttention(), AttentionSpec(scale=HEAD_DIM**-0.5)
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    return lambda: torch.autograd.grad(core(q, k, v, batch, spec), (q, k, v), grad)


def _torch_side(lengths: list[int], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Callable[[], object]:
    """One batched call if all documents have one length, else one call per document."""
    equal = len(set(lengths)) == 1
    pieces = [len(lengths)] if equal else [1] * len(lengths)
    sizes = [sum(lengths)] if equal else lengths
    calls = []
    for count, parts in zip(pieces, zip(*(x.split(sizes) for x in (q, k, v, grad)), strict=True), strict=True):
        # [tokens, heads, d] -> [documents, heads, tokens / documents, d]
        *inputs, out_grad = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in parts)
        calls.append(([x.detach().clone().requires_grad_() for x in inputs], out_grad))

    def step() -> list[object]:
        return [
            torch.autograd.grad(F.scaled_dot_product_attention(*inputs, is_causal=True), inputs, out_grad)
            for inputs, out_grad in calls
        ]

    return step
