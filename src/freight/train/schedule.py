"""Learning rate over optimizer updates: warmup, a stable stretch, decay to a floor.

One formula serves all names. Update s counts from 0, and no update has rate 0: warmup gives `(s + 1) / warmup`; decay
gives `shape(p)` with `p = (s - start) / decay`, so its first update still has the full rate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from freight.config.checks import schedule_faults
from freight.config.schema import ScheduleConfig
from freight.errors import ConfigError


class Phases(NamedTuple):
    """Updates of each phase, one after another; what is left of the run after them stays at the floor."""

    warmup: int
    stable: int
    decay: int


def phases(total: int, schedule: ScheduleConfig) -> Phases:
    """Resolve a schedule for a run of `total` updates.

    Raises:
        ConfigError: The phases do not fit, contradict each other or have no effect.
    """
    faults = list(schedule_faults(schedule, total))
    if faults:
        raise ConfigError(*faults)
    warmup = schedule.warmup_steps or math.ceil((schedule.warmup_ratio or 0) * total)
    stable, decay = schedule.stable_steps, schedule.decay_steps
    if schedule.name == "constant":
        stable, decay = total - warmup, 0
    elif schedule.name == "wsd" and stable is None:
        stable = max(total - warmup - (decay or 0), 0)
    stable = stable or 0
    decay = max(total - warmup - stable, 0) if decay is None else decay
    if warmup + stable + decay > total:
        raise ConfigError(
            f"`train.schedule.warmup_ratio` {schedule.warmup_ratio} is {warmup} steps; with stable {stable} and decay "
            f"{decay} they do not fit in the run's {total}. Shorten one of them."
        )
    return Phases(warmup, stable, decay)


def learning_rate_factor(step: int, total: int, schedule: ScheduleConfig) -> float:
    """Factor on `train.optimizer.lr` for one update.

    Args:
        step: Updates applied before this one, from 0.
        total: Updates of the whole run.
        schedule: What the user wrote.
    """
    warmup, stable, decay = phases(total, schedule)
    if step < warmup:
        return (step + 1) / warmup
    if step < warmup + stable or decay == 0:
        return 1.0
    progress = min((step - warmup - stable) / decay, 1.0)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape
