"""Tasks that stop where they would wait for others, run so that one waits while the next ones compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

DONE = object()


def staggered(tasks: Iterable[Iterator[None]], *, overlap: bool) -> None:
    """Run tasks to their ends; each yields between its stages.

    With overlap, task n's first stage comes before the second one of n - 1 and the third one of n - 2: what a stage has
    begun is under way while other tasks compute, and there are as many tasks under way as they have stages. Stages of
    one number run in the order of the tasks either way.

    Args:
        tasks: Made one by one, when it is their turn.
        overlap: False runs one task after another.
    """
    under_way: list[Iterator[None]] = []  # latest first
    for task in tasks:
        under_way = _advance([task, *under_way])
        while under_way and not overlap:
            under_way = _advance(under_way)
    while under_way:
        under_way = _advance(under_way)


def _advance(tasks: Sequence[Iterator[None]]) -> list[Iterator[None]]:
    """One stage of each; those that have more."""
    return [task for task in tasks if next(task, DONE) is not DONE]
