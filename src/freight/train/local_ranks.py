"""`freight train --ranks N`: N processes of this machine, started the way torchrun starts them.

The parent keeps the store through which they find each other, on a port that the system chooses, so no port is hunted
for. Signals go on to all ranks; when one ends badly, the others get time to say why and are then ended.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

GRACE_SECONDS = 15.0
LOOK_SECONDS = 0.05
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_local_ranks(ranks: int, arguments: Sequence[str]) -> tuple[int, str | None]:
    """Run a command of Freight as several ranks.

    Args:
        ranks: How many.
        arguments: Of `freight`, for each of them.

    Returns:
        The exit code of the first rank that ended badly, else 0; and what to say of a rank that could not speak for
        itself.
    """
    store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here already; no rank is to open one
    }
    processes = [_start(arguments, {**variables, "RANK": rank, "LOCAL_RANK": rank}) for rank in range(ranks)]
    previous = {number: signal.signal(number, _forward_to(processes)) for number in FORWARDED}
    try:
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _start(arguments: Sequence[str], variables: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A rank in a session of its own: the terminal's Ctrl-C reaches it through the parent, once."""
    # `env` adds to the environment; to hand over a whole one, it would have to be read first.
    environment = [f"{name}={value}" for name, value in variables.items()]
    command = ["/usr/bin/env", *environment, sys.executable, "-m", "freight", *arguments]
    return subprocess.Popen(command, start_new_session=True)


def _forward_to(processes: Sequence[subprocess.Popen[bytes]]) -> Any:
    def forward(number: int, _: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    return forward


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, str | None]:
    """Until all have ended, or some time after one has ended badly."""
    failed: tuple[int, int] | None = None
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if failed is None and (bad := [(rank, p.returncode) for rank, p in enumerate(processes) if p.returncode]):
            failed, deadline = bad[0], time.monotonic() + GRACE_SECONDS
        time.sleep(LOOK_SECONDS)
    codes = [process.returncode for process in processes]
    killed = [(rank, code) for rank, code in enumerate(codes) if code is not None and code < 0]
    if failed is None:
        failed = next(((rank, code) for rank, code in enumerate(codes) if code), None)
    if failed is None:
        return 0, None
    if killed:
        rank, code = killed[0]
        return 1, f"rank {rank} was ended by signal {-code} ({signal.Signals(-code).name})"
    return failed[1], None
