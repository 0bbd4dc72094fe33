"""Dropout masks as a function of where a number stands, not of a generator's state.

The mask of an attention pair is a hash of (seed, step, layer, head, query, key). However the work is cut (blocks,
chunks, ranks, a second run of the same layer), the same pairs are dropped. The price is integer arithmetic on every
pair: dropout is for small models, where that does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
BLOCK_NUMBERS = 1 << 15  # 128 KiB of int32: a block stays in a core's cache


def keep_mask(seed_parts: tuple[int, ...], rows: Tensor, cols: Tensor, rate: float) -> Tensor:
    """Which elements of a matrix survive dropout.

    Args:
        seed_parts: Whatever tells this matrix from another: seed, step, layer, ...; any integers.
        rows: int64 `[..., rows]`, number of each row, below 2^63.
        cols: int64 `[..., cols]`, number of each column, below 2^63.
        rate: Share of elements dropped, in [0, 1).

    Returns:
        bool `[..., rows, cols]`, True with probability `1 - rate`, the leading dims broadcast.

    **Source**: the mixing step is the low-bias 32-bit hash of C. Wellons ("Prospecting for hash functions", 2018).
    """
    seed = _seed(seed_parts)
    row_hash = (_hash_numbers(rows, seed & _LOW) * 3).to(torch.int32).unsqueeze(-1)  # the low 32 bits
    col_hash = _hash_numbers(cols, seed >> 32).to(torch.int32).unsqueeze(-2)
    limit = int(rate * (1 << 32)) - (1 << 31)
    if row_hash.device.type != "cpu":
        return _kept(row_hash, col_hash, limit)
    block = max(1, BLOCK_NUMBERS // max(1, cols.shape[-1]))
    return torch.cat([_kept(part, col_hash, limit) for part in row_hash.split(block, dim=-2)], dim=-2)


def _kept(row_hash: Tensor, col_hash: Tensor, limit: int) -> Tensor:
    """The pairs whose hash, as an unsigned number, is at least `limit + 2^31`; everything in place, in int32."""
    x = row_hash + col_hash
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # shifts keep the sign, the mask takes it away again
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x.bitwise_xor_(-(1 << 31)) >= limit


def _hash_numbers(numbers: Tensor, seed: int) -> Tensor:
    """32 hash bits of 64-bit numbers, in int64."""
    return _mix(_mix(numbers & _LOW ^ seed) ^ (numbers >> 32) & _LOW)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers held in int64; products wrap, and only their low 32 bits are kept."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & _LOW
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & _LOW
    return x ^ (x >> 16)


def _seed(parts: tuple[int, ...]) -> int:
    """64 bits of any integers; splitmix64, part by part."""
    mask = (1 << 64) - 1
    state = 0
    for part in parts:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & mask
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        state ^= state >> 31
    return state


def scaled_keep(keep: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """Factors on what dropout leaves: `1 / (1 - rate)` where kept, 0 elsewhere."""
    return keep.to(dtype).mul_(1 / (1 - rate))
