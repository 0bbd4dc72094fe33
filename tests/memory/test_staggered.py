"""Tasks in stages: which comes when, and that all of them come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from freight.memory.staggered import staggered


def order(stages: list[int], *, overlap: bool) -> list[str]:
    """What runs when: `task.stage`."""
    found: list[str] = []

    def task(number: int) -> Iterator[None]:
        for stage in range(stages[number]):
            if stage:
                yield
            found.append(f"{number}.{stage}")

    staggered((task(number) for number in range(len(stages))), overlap=overlap)
    return found


def test_a_task_begins_before_the_one_before_it_goes_on() -> None:
    assert order([3, 3, 3], overlap=True) == ["0.0", "1.0", "0.1", "2.0", "1.1", "0.2", "2.1", "1.2", "2.2"]


def test_without_overlap_they_come_one_after_another() -> None:
    assert order([3, 2, 3], overlap=False) == ["0.0", "0.1", "0.2", "1.0", "1.1", "2.0", "2.1", "2.2"]


@pytest.mark.parametrize("stages", [[], [1], [1, 1, 1], [3, 1, 2, 3, 1], [2, 2]])
def test_every_stage_runs_once_and_in_the_order_of_tasks(stages: list[int]) -> None:
    found = order(stages, overlap=True)
    assert sorted(found) == sorted(order(stages, overlap=False))
    for stage in range(3):
        numbers = [int(each.split(".")[0]) for each in found if each.endswith(f".{stage}")]
        assert numbers == sorted(numbers)


def test_a_task_that_is_not_due_is_not_made() -> None:
    made: list[int] = []

    def task(number: int) -> Iterator[None]:
        if number == 1:
            raise ValueError("full")
        yield

    def make(number: int) -> Iterator[None]:
        made.append(number)
        return task(number)

    with pytest.raises(ValueError, match="full"):
        staggered((make(number) for number in range(9)), overlap=True)
    assert made == [0, 1]
