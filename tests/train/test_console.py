"""What a user sees: the exact step line, bars on a terminal only, silence for what is quick."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from freight.train.console import Progress, TrainingDisplay, duration, evaluation_line, gibibytes, step_line

METRICS = {
    "train/loss": 2.31,
    "train/grad_norm": 0.9,
    "train/lr": 2e-5,
    "train/epoch": 0.3,
    "perf/tokens_per_second": 412.3,
    "perf/mfu": 0.41,
    "memory/peak_bytes": 3.2 * 2**30,
}


def console(terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, color_system=None), out


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_step_line() -> None:
    assert step_line(10, 200, METRICS, 250.0) == (
        "step 10/200  loss 2.31  grad 0.90  lr 2.0e-05  412 tok/s  mfu 41%  mem 3.2 GiB  eta 4:10"
    )


def test_step_line_leaves_out_what_is_not_known() -> None:
    assert step_line(3, None, {"train/grad_norm": math.nan, "perf/tokens_per_second": 12345.0}) == (
        "step 3  grad nan  12,345 tok/s"
    )


def test_evaluation_line() -> None:
    line = evaluation_line(50, 200, math.log(3.0), 12345)
    assert line == "step 50/200  held-out loss 1.0986  perplexity 3.00  (12,345 tokens)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (-5, "0:00"),
        (9.2, "0:10"),
        (250, "4:10"),
        (3723, "1:02:03"),
        (183845, "2d 3:04:05"),
        (math.nan, "-"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_gibibytes() -> None:
    assert [gibibytes(2**29), gibibytes(1.5 * 2**30)] == ["512 MiB", "1.5 GiB"]


def test_progress_is_silent_for_two_seconds_then_speaks_every_ten() -> None:
    output, out = console()
    clock = Clock()
    with Progress(output, clock) as progress:
        for second in range(31):
            clock.now = 100.0 + second
            progress(second, 60, "tokenise")
            if second < 10:
                assert out.getvalue() == ""
    assert out.getvalue().splitlines() == [
        "tokenise: 10 of 60 (17%)  eta 0:50",
        "tokenise: 20 of 60 (33%)  eta 0:40",
        "tokenise: 30 of 60 (50%)  eta 0:30",
    ]


def test_words_behind_a_colon_change_without_a_new_stage() -> None:
    (quiet, out), clock = console(), Clock()
    progress = Progress(quiet, clock)
    for _ in range(24):
        progress(int(clock.now), 1000, f"tokenising: {clock.now:.0f} records/s, 3 left out")
        clock.now += 1
    assert out.getvalue().splitlines() == [
        "tokenising: 110 of 1,000 (11%)  110 records/s, 3 left out  eta 1:21",
        "tokenising: 120 of 1,000 (12%)  120 records/s, 3 left out  eta 2:27",
    ]
    (terminal, drawn), clock = console(terminal=True), Clock()
    with Progress(terminal, clock) as progress:
        for seconds in (0, 3, 6):
            clock.now = 100 + seconds
            progress(seconds, 10, f"tokenising: {seconds} records/s")
    assert "tokenising: 6 records/s" in drawn.getvalue() and "6/10" in drawn.getvalue()


def test_a_quick_stage_shows_no_bar_and_a_slow_one_does() -> None:
    output, out = console(terminal=True)
    clock = Clock()
    with Progress(output, clock) as progress:
        progress(0, 10, "index")
        clock.now += 1.9
        progress(10, 10, "index")
        progress(0, 10, "pack")
        clock.now += 1.9
        progress(5, 10, "pack")
        assert out.getvalue() == ""
        clock.now += 0.2
        progress(6, 10, "pack")
    assert "pack" in out.getvalue()
    assert "6/10" in out.getvalue()
    assert "index" not in out.getvalue()


def test_unknown_totals_are_counted() -> None:
    output, out = console()
    clock = Clock()
    progress = Progress(output, clock)
    progress(0, 0, "read")
    clock.now += 11
    progress(12345, 0, "read")
    assert out.getvalue() == "read: 12,345\n"


def test_training_prints_a_line_per_step_where_there_is_no_terminal() -> None:
    output, out = console()
    with TrainingDisplay(output) as display:
        display.step(10, 200, METRICS, 250.0)
        display.say("[saved] checkpoints/step-000010")
    assert out.getvalue().splitlines() == [step_line(10, 200, METRICS, 250.0), "[saved] checkpoints/step-000010"]


def test_training_keeps_its_numbers_beside_the_bar_on_a_terminal() -> None:
    output, out = console(terminal=True)
    with TrainingDisplay(output) as display:
        display.step(1, 2, METRICS, 250.0)
        display.say("evaluated")
        display.step(2, 2, METRICS, 0.0)
    assert "evaluated" in out.getvalue()
    assert "step 2/2  loss 2.31" in out.getvalue()


def test_an_evaluation_gets_a_second_bar_that_goes_when_it_is_done() -> None:
    output, out = console(terminal=True)
    with TrainingDisplay(output) as display:
        display.step(1, 2, METRICS, 250.0)
        display.progress(1, 8, "evaluate")
        assert "evaluate" in out.getvalue()
        display.progress(8, 8, "evaluate")
        position = out.tell()
        display.step(2, 2, METRICS, 0.0)
        assert "evaluate" not in out.getvalue()[position:]


def test_preparation_is_shown_before_the_first_step() -> None:
    output, out = console()
    clock = Clock()
    with TrainingDisplay(output, clock) as display:
        display.progress(0, 100, "tokenise")
        clock.now += 10
        display.progress(50, 100, "tokenise")
    assert out.getvalue() == "tokenise: 50 of 100 (50%)  eta 0:10\n"


def test_a_finished_stage_leaves_no_bar_behind() -> None:
    output, out = console(terminal=True)
    clock = Clock()
    progress = Progress(output, clock)
    progress(0, 4, "pack")
    clock.now += 3
    progress(3, 4, "pack")
    progress(4, 4, "pack")
    position = out.tell()
    output.print("a line")
    assert out.getvalue()[position:] == "a line\n"
