"""Rotary embedding token by token and pair by pair, in Python floats; every scaling type from its formula."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from freight.config.architecture import RopeConfig


def frequencies(config: RopeConfig, head_dim: int, longest: int, length: int) -> list[float]:
    """Radians per position of each pair, for a document of `length` tokens; `longest` = max_position_embeddings."""
    scaling, theta = config.scaling, config.theta
    kind = scaling.type if scaling else None
    rot = head_dim if kind == "proportional" else int(head_dim * config.percent)
    plain = [theta ** (-2 * i / rot) for i in range(rot // 2)]
    if scaling is None:
        return plain
    original = scaling.original_max_position_embeddings or longest
    factor = scaling.factor or longest / original
    if kind == "linear":
        return [w / factor for w in plain]
    if kind == "dynamic":
        n = max(length, longest)
        base = theta * (factor * n / longest - (factor - 1)) ** (rot / (rot - 2))
        return [base ** (-2 * i / rot) for i in range(rot // 2)]
    if kind == "proportional":
        rotated = int(config.percent * head_dim / 2)
        return [w / (scaling.factor or 1.0) if i < rotated else 0.0 for i, w in enumerate(plain)]
    if kind == "longrope":
        factors = scaling.long_factor if length > original else scaling.short_factor
        assert factors is not None
        return [w / f for w, f in zip(plain, factors, strict=True)]
    if kind == "llama3":
        assert scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
        out = []
        for w in plain:
            wavelength = 2 * math.pi / w
            if wavelength < original / scaling.high_freq_factor:
                out.append(w)
            elif wavelength > original / scaling.low_freq_factor:
                out.append(w / factor)
            else:
                smooth = original / wavelength - scaling.low_freq_factor
                smooth /= scaling.high_freq_factor - scaling.low_freq_factor
                out.append((1 - smooth) * w / factor + smooth * w)
        return out
    assert kind == "yarn"
    low = rot * math.log(original / (scaling.beta_fast * 2 * math.pi)) / (2 * math.log(theta))
    high = rot * math.log(original / (scaling.beta_slow * 2 * math.pi)) / (2 * math.log(theta))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rot - 1)
    high = high + 0.001 if low == high else high
    ramps = [min(max((i - low) / (high - low), 0), 1) for i in range(rot // 2)]
    return [w / factor * r + w * (1 - r) for w, r in zip(plain, ramps, strict=True)]


def rotate(x: Tensor, position: int, omegas: list[float], temperature: float, interleaved: bool) -> Tensor:
    """One head vector `[head_dim]` at one position; differentiable."""
    rot = 2 * len(omegas)
    out = [*x.unbind()]
    for i, omega in enumerate(omegas):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rot // 2)
        cos, sin = math.cos(position * omega) * temperature, math.sin(position * omega) * temperature
        out[a], out[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return torch.stack(out)
