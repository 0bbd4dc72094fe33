"""Masks as a function of position."""

from __future__ import annotations

import pytest
import torch

from freight.ops import dropout
from freight.ops.dropout import keep_mask


def test_rate() -> None:
    """Of 2^18 draws, within five standard deviations."""
    n = torch.arange(512)
    for rate in (0.1, 0.5, 0.9):
        kept = keep_mask((1, 2, 3), n, n, rate).double().mean().item()
        assert abs(kept - (1 - rate)) < 5 * (rate * (1 - rate) / 2**18) ** 0.5


def test_rate_zero_keeps_all() -> None:
    n = torch.arange(64)
    assert keep_mask((0,), n, n, 0.0).all()


def test_a_part_drops_what_the_whole_drops() -> None:
    n = torch.arange(100)
    whole = keep_mask((7, 0), n, n, 0.3)
    assert torch.equal(keep_mask((7, 0), n[20:50], n[60:], 0.3), whole[20:50, 60:])


def test_each_seed_part_and_position_matters() -> None:
    n = torch.arange(64)
    masks = [
        keep_mask(parts, rows, cols, 0.5)
        for parts in ((1, 2), (2, 1), (1, 3), (1, 2, 0))
        for rows, cols in ((n, n), (n + (1 << 32), n), (n, n + (1 << 32)))
    ]
    for i, a in enumerate(masks):
        for b in masks[i + 1 :]:
            assert 0.4 < (a == b).double().mean().item() < 0.6


def test_rows_and_columns_are_independent() -> None:
    """No row repeats another, shifted or not; correlations stay those of chance."""
    n = torch.arange(256)
    signs = keep_mask((5,), n, n, 0.5).double() * 2 - 1
    correlation = signs @ signs.t() / 256
    correlation.fill_diagonal_(0)
    assert correlation.abs().max().item() < 0.35
    assert not torch.equal(signs, signs.t())


@pytest.mark.parametrize("shape", [(5, 7), (70, 1000), (3, 40, 9)])
def test_hashes_are_those_of_the_published_function(shape: tuple[int, ...]) -> None:
    """Against the 32-bit function in Python's integers, over several blocks and leading dims."""
    *leading, num_rows, num_cols = shape
    rows = torch.arange(num_rows) * 3 + (torch.tensor([1 << 33, 5, 9])[:, None] if leading else 0)
    mask = keep_mask((7, 1), rows, torch.arange(num_cols) * 11, 0.3)
    assert mask.shape == shape
    seed = dropout._seed((7, 1))
    flat_rows, flat = rows.flatten().tolist(), mask.flatten(0, -2)
    for i in range(0, len(flat_rows), 7):
        for j in range(0, num_cols, 13):
            pair = _mixed(flat_rows[i], seed & 0xFFFFFFFF) * 3 + _mixed(j * 11, seed >> 32)
            assert bool(flat[i, j]) == (_mix(pair) >= int(0.3 * 2**32))


def _mixed(number: int, seed: int) -> int:
    return _mix(_mix((number & 0xFFFFFFFF) ^ seed) ^ (number >> 32) & 0xFFFFFFFF)


def _mix(x: int) -> int:
    x &= 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16
