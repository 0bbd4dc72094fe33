"""Ranks of a benchmark as fresh processes, which end together."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Ended:
    """How processes ended.

    Args:
        codes: Exit code of each rank; None if it was still running when time was up, or when another one had failed.
        timed_out: Whether time was up.
        folder: With what they printed.
    """

    codes: Sequence[int | None]
    timed_out: bool
    folder: Path

    @property
    def failed(self) -> int | None:
        """The first rank that ended with another code than 0."""
        return next((rank for rank, code in enumerate(self.codes) if code), None)

    def printed(self, rank: int) -> str:
        """The last line of a rank's output."""
        return _lines(self.folder / f"{rank}.out")[-1]

    def said(self, rank: int, lines: int = 1) -> str:
        """The last lines of a rank's errors, or its exit code."""
        said = _lines(self.folder / f"{rank}.err") or [f"exit code {self.codes[rank]}"]
        return " / ".join(said[-lines:])


def module_command(
    module: str, *arguments: str, variables: Mapping[str, object], prefix: Sequence[str] = ()
) -> list[str]:
    """The command that runs a module of Freight's.

    Args:
        module: Its name.
        *arguments: Its own.
        variables: Added to its environment; by `env`, because to hand over a whole one, it would have to be read first.
        prefix: What the command is run by (`ip netns exec NAME`, say).
    """
    settings = [f"{name}={value}" for name, value in variables.items()]
    return [*prefix, "/usr/bin/env", *settings, sys.executable, "-W", "ignore", "-m", module, *arguments]


def run_ranks(commands: Sequence[Sequence[str]], folder: Path, max_seconds: float) -> Ended:
    """Run one command per rank until all have ended well, or one has not; then none is left.

    Args:
        commands: By rank.
        folder: For what they print.
        max_seconds: Until all must have ended.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, command in enumerate(commands):
            with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
                processes.append(subprocess.Popen(command, stdout=out, stderr=err))
        timed_out = not _ended(processes, time.monotonic() + max_seconds)
        return Ended([process.poll() for process in processes], timed_out, folder)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _ended(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until all have ended well or one has not; False at the deadline."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes):
            time.sleep(POLL_SECONDS)  # the one that failed first may end just after one that lost it
        if any(codes) or all(code == 0 for code in codes):
            return True
        time.sleep(POLL_SECONDS)
    return False


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
