"""Which method is taken, and what is refused, from values alone."""

from __future__ import annotations

from typing import Any

import pytest

from freight.errors import ConfigError
from freight.parallel.context_method import choose_context_method

BASE: dict[str, Any] = dict(
    ranks=8, heads=32, groups=8, ranks_per_node=8, windows=[None, None], local_tokens=1024, ulysses=None
)


def choose(requested: Any = "auto", **changes: Any) -> tuple[str, int]:
    choice = choose_context_method(requested, **BASE | changes)
    assert choice.reason
    return choice.method.value, choice.ulysses


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("ulysses", 8)),
        (dict(ranks=16), ("hybrid", 8)),
        (dict(groups=1), ("ring", 1)),
        (dict(groups=4), ("hybrid", 4)),
        (dict(groups=6, heads=12), ("hybrid", 2)),
        (dict(ranks_per_node=1), ("ring", 1)),
        (dict(ranks_per_node=4, ranks=4), ("ulysses", 4)),
        (dict(windows=[512, 1024]), ("all_gather", 1)),
        (dict(windows=[512, 1025]), ("ulysses", 8)),
        (dict(windows=[512, None]), ("ulysses", 8)),
        (dict(windows=[]), ("ulysses", 8)),
        (dict(ulysses=2), ("hybrid", 2)),
        (dict(ulysses=1), ("ring", 1)),
        (dict(ulysses=8, groups=1), ("ulysses", 8)),
        (dict(streamed=True, groups=1), ("ulysses", 8)),
        (dict(streamed=True, ranks=64), ("hybrid", 32)),
        (dict(streamed=True, ranks=8, heads=6, groups=3), ("hybrid", 2)),
        (dict(streamed=True, ranks=8, heads=5, groups=5), ("all_gather", 1)),
        (dict(streamed=True, windows=[512, 512]), ("ulysses", 8)),
    ],
)
def test_automatic(changes: dict[str, Any], expected: tuple[str, int]) -> None:
    assert choose(**changes) == expected


@pytest.mark.parametrize(
    ("requested", "changes", "expected"),
    [
        ("ring", {}, ("ring", 1)),
        ("all_gather", dict(streamed=True), ("all_gather", 1)),
        ("ulysses", dict(groups=1), ("ulysses", 8)),
        ("hybrid", dict(ranks=16), ("hybrid", 8)),
        ("hybrid", dict(ulysses=4), ("hybrid", 4)),
        ("hybrid", dict(windows=[8, 8], ulysses=4), ("hybrid", 4)),
    ],
)
def test_asked_for(requested: str, changes: dict[str, Any], expected: tuple[str, int]) -> None:
    assert choose(requested, **changes) == expected


def test_windows_make_contiguous_pieces_even() -> None:
    assert choose_context_method("ring", **BASE | dict(windows=[8, 8])).contiguous
    assert not choose_context_method("ring", **BASE | dict(windows=[8, None])).contiguous
    assert choose_context_method("ring", **BASE, causal=False).contiguous


@pytest.mark.parametrize(
    ("requested", "changes", "message"),
    [
        (
            "ulysses",
            dict(heads=4, groups=4),
            "`parallel.context` 8 with `context_method: ulysses` needs at least 8 query heads per tensor-parallel rank;"
            " there are 4. Use `context_method: hybrid`, or `parallel.context` 4.",
        ),
        (
            "hybrid",
            dict(ulysses=3),
            "`parallel.ulysses` must divide `parallel.context`; 3 and 8. Use 1, 2, 4 or 8.",
        ),
        (
            "ring",
            dict(ulysses=4),
            "`parallel.ulysses` is 4 but `parallel.context_method` is ring, so it has no effect. Remove it or use "
            "`hybrid`.",
        ),
        (
            "hybrid",
            dict(ulysses=8, heads=6, groups=2),
            "`parallel.ulysses` 8 needs at least 8 query heads per tensor-parallel rank; there are 6. Use 1, 2 or 4.",
        ),
        (
            "ring",
            dict(streamed=True),
            "`parallel.context_method: ring` cannot run under `fpdt`: K, V would circle once per chunk. Use `ulysses`, "
            "`all_gather` or `auto`.",
        ),
    ],
)
def test_refused(requested: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose(requested, **changes)
    assert str(error.value) == message
