"""Masks as a function of position."""

from __future__ import annotations

import torch

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
