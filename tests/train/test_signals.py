"""Several ranks act on a signal together, whenever each of them gets it."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from freight.train.launch import World
from freight.train.signals import StopSignals


class Ranks(World):
    """Two ranks, of which the other one got `number`."""

    number = 0

    def largest(self, value: int) -> int:
        return max(value, self.number)


def ranks(number: int = 0) -> World:
    world = Ranks(0, 2, torch.device("cpu"))
    object.__setattr__(world, "number", number)
    return world


def test_a_signal_after_the_ranks_have_agreed_waits_until_they_do_so_again() -> None:
    with StopSignals() as signals:
        signals.agree(ranks())
        signal.raise_signal(signal.SIGTERM)
        assert signals.requested is None, "the other rank goes on with the next step"
        signals.agree(ranks())
        assert (signals.requested, signals.exit_code) == (signal.SIGTERM, 143)


def test_the_same_signal_later_on_this_rank_is_not_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    with StopSignals() as signals:
        signals.agree(ranks(signal.SIGTERM))
        signal.raise_signal(signal.SIGTERM)
        assert (signals.requested, exits) == (signal.SIGTERM, [])
        signal.raise_signal(signal.SIGTERM)
        assert exits == [143]
