"""`freight train --ranks N`: it trains and speaks once; a rank that dies takes the others along, with a reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from freight.cli.main import app
from tests.cli.tiny_files import config


def start(path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "freight", "train", str(path), "--ranks", "2", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_ranks_train_a_row_together_and_a_dead_one_ends_the_other(tmp_path: Path) -> None:
    path = config(tmp_path, parallel={"context": 2}, train={"steps": 100_000})
    run = start(path)
    try:
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            if line.startswith("step 3/"):
                break
        assert sum(line.startswith("step 1/") for line in lines) == 1, "one rank speaks"
        assert any("ranks: 2 = 1 with microbatches of their own x 2 that share one" in line for line in lines)
        ranks = children(run.pid)
        assert len(ranks) == 2
        killed = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        faults, _ = run.communicate(timeout=60)
        assert time.monotonic() - killed < 40
        assert run.returncode == 1
        assert "rank 0 lost another rank at step" in faults and "Traceback" not in faults
        assert "rank 1 was ended by signal 9 (SIGKILL)" in faults
        assert not any(Path(f"/proc/{rank}/cmdline").exists() for rank in ranks)
    finally:
        run.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "3", "parallel.context=2"], "`parallel.context` 2 must divide the 3 processes. Use 1 or 3"),
        (["parallel.context=2"], "or start 2 processes: freight train CONFIG --ranks 2"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_before_any_starts(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["train", str(config(tmp_path)), *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
