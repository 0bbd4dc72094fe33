"""Schedules against their formulas, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.config.schema import ScheduleConfig
from freight.errors import ConfigError
from freight.train.schedule import Phases, learning_rate_factor, phases


def factors(total: int, **keys: object) -> list[float]:
    schedule = ScheduleConfig.model_validate(keys)
    return [learning_rate_factor(step, total, schedule) for step in range(total)]


def test_no_step_at_zero_and_none_off_by_one() -> None:
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    wsd = {"name": "wsd", "warmup_steps": 4, "min_lr_ratio": 0.0}
    assert factors(10, **wsd, stable_steps=2, decay_steps=4) == expected
    assert factors(10, **wsd, decay_steps=4) == expected
    assert factors(10, **wsd, stable_steps=2) == expected


def test_no_warmup_and_no_decay_is_constant() -> None:
    assert factors(3, name="wsd", warmup_steps=0, decay_steps=0) == [1, 1, 1]
    assert factors(4, name="constant", warmup_steps=2) == [0.5, 1, 1, 1]


def test_cosine_and_linear_reach_their_floor_after_the_last_step() -> None:
    cosine = factors(4, name="cosine", min_lr_ratio=0.1)
    assert cosine == pytest.approx([0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * s / 4)) for s in range(4)])
    assert factors(4, name="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert factors(4, name="linear", min_lr_ratio=0.2, decay_steps=2) == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_warmup_ratio_is_a_share_of_the_run() -> None:
    assert phases(10, ScheduleConfig(warmup_ratio=0.25)) == Phases(3, 0, 7)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"warmup_steps": 11}, "must be at most the run's 10 steps; got 11"),
        (
            {"name": "wsd", "warmup_steps": 5, "stable_steps": 5, "decay_steps": 1},
            "must be at most the run's 10 steps; got 11",
        ),
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, "Keep one"),
        (
            {"name": "wsd", "warmup_ratio": 0.5, "stable_steps": 6},
            "is 5 steps; with stable 6 and decay 0 they do not fit",
        ),
        ({"name": "constant", "decay_steps": 3}, "decay_steps` has no effect"),
        ({"name": "wsd"}, "needs decay_steps or stable_steps"),
    ],
)
def test_schedules_that_cannot_be_are_config_errors(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("+", r"\+")):
        phases(10, ScheduleConfig.model_validate(keys))


@given(
    total=st.integers(1, 60),
    warmup=st.integers(0, 20),
    name=st.sampled_from(["cosine", "linear", "constant"]),
    floor=st.floats(0, 1),
)
def test_every_rate_is_positive_and_rises_then_falls(total: int, warmup: int, name: str, floor: float) -> None:
    keys = {"name": name, "warmup_steps": min(warmup, total)}
    rates = factors(total, **keys, **({} if name == "constant" else {"min_lr_ratio": floor}))
    assert all(0 < rate <= 1 for rate in rates)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
