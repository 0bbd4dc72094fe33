"""Several processes, one order; and every way in which they can end."""

import os

import pytest

from freight.data.tokens.worker_pool import AHEAD, WorkerDeath, WorkerPool, usable_processes
from freight.errors import DataError
from tests.data.pool_tasks import work


def run(tasks, taken=None):
    results = []
    with WorkerPool(work, 2, "testing") as pool:
        for kept, result in pool.map(tasks):
            results.append((kept, result[0], result[1]))
            if taken is not None:
                taken(results)
    return results


def test_results_keep_the_order_of_the_tasks_and_reading_stays_near():
    read, distance = [], []

    def tasks():
        for number in range(40):
            read.append(number)
            yield f"kept {number}", (0.05 if number % 7 == 0 else 0.0, number)

    results = run(tasks(), lambda results: distance.append(len(read) - len(results)))
    assert [(kept, answer) for kept, answer, _ in results] == [(f"kept {number}", number) for number in range(40)]
    assert len({pid for *_, pid in results}) == 2 and os.getpid() not in {pid for *_, pid in results}
    assert max(distance) < 2 * AHEAD


def test_a_worker_uses_no_threads_of_the_tokenizers_library():
    with WorkerPool(work, 1, "testing") as pool:
        assert [result[2] for _, result in pool.map([(0, (0, "x"))])] == ["false"]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ("refuse", DataError, "^refused$"),
        ("break", RuntimeError, "KeyError: 'lost'"),
        ("die", WorkerDeath, "a process of testing was ended by SIGKILL; memory may have run out"),
        ("leave", WorkerDeath, "a process of testing ended with code 3; a script that calls Freight must"),
    ],
)
def test_a_failure_is_raised_here(answer, kind, words):
    seen = []
    with pytest.raises(kind, match=words), WorkerPool(work, 2, "testing") as pool:
        for kept, _ in pool.map([(0, (0.3, "slow")), (1, (0.0, answer)), (2, (0.0, "after"))]):
            seen.append(kept)
    assert 2 not in seen and (seen == [0] or answer in ("die", "leave"))


def test_what_was_read_before_reading_failed_is_still_given():
    def tasks():
        yield 0, (0.1, "first")
        raise DataError("the file ends here")

    seen = []
    with pytest.raises(DataError, match="ends here"), WorkerPool(work, 2, "testing") as pool:
        for kept, _ in pool.map(tasks()):
            seen.append(kept)
    assert seen == [0]


def test_processes_are_as_many_as_cores_up_to_a_limit():
    assert usable_processes(1) == 1
    assert usable_processes(1000) == len(os.sched_getaffinity(0))
