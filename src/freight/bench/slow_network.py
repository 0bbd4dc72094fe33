"""A network of known speed between the ranks of one machine.

Over loopback a message costs the processor time it is copied in, so computing and communicating cannot overlap where
cores are scarce, and no rate is known. Here every rank lives in a Linux network namespace of its own; a cable (veth)
leads to a bridge in one more, and `tc tbf` limits what each sends. All of it is inside namespaces: removing those
removes everything, and the machine's own network is never touched. It needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

PREFIX = "freight"
INTERFACE = "rank0"
# A burst holds several of the 64 KiB packets that a kernel hands over whole; the queue is a twentieth of a second.
BURST, QUEUE = "256kb", "50ms"


@dataclass(frozen=True)
class Network:
    """Where ranks run.

    Args:
        kind: `namespaces` or `loopback`.
        reason: Why not namespaces; empty if they are.
        rate_mbit: What each rank can send, in 10^6 bits a second; None = unlimited.
        prefixes: By rank, what a command line begins with to run there.
        interface: The ranks' network interface.
    """

    kind: str
    reason: str
    rate_mbit: float | None
    prefixes: tuple[tuple[str, ...], ...]
    interface: str


@contextmanager
def slow_network(ranks: int, rate_mbit: float) -> Iterator[Network]:
    """Namespaces while entered, where that is possible; else loopback, and the reason.

    Args:
        ranks: Number of processes.
        rate_mbit: What each may send, in 10^6 bits a second; 0 asks for loopback.
    """
    reason = _missing(rate_mbit)
    if reason:
        yield _loopback(ranks, reason)
        return
    names = [f"{PREFIX}-{os.getpid()}-{rank}" for rank in range(ranks)]
    bridge = f"{PREFIX}-{os.getpid()}-bridge"
    with _ends_orderly():
        try:
            yield _built(names, bridge, rate_mbit)
        finally:
            _remove([*names, bridge])


def _loopback(ranks: int, reason: str) -> Network:
    return Network("loopback", reason, None, ((),) * ranks, "lo")


def _built(names: Sequence[str], bridge: str, rate_mbit: float) -> Network:
    """The network; loopback where the machine forbids it, as containers may even to root."""
    try:
        _remove_leftovers()
        _build(names, bridge, rate_mbit)
    except OSError as error:
        return _loopback(len(names), str(error))
    prefixes = tuple(("ip", "netns", "exec", name) for name in names)
    return Network("namespaces", "", rate_mbit, prefixes, INTERFACE)


def _missing(rate_mbit: float) -> str:
    if not rate_mbit:
        return "`rate_mbit` is 0"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} of iproute2 not found"
    return "" if os.geteuid() == 0 else "not root"


def _build(names: Sequence[str], bridge: str, rate_mbit: float) -> None:
    _ip("netns", "add", bridge)
    _ip("-n", bridge, "link", "add", "bridge0", "type", "bridge")
    _ip("-n", bridge, "link", "set", "bridge0", "up")
    for rank, name in enumerate(names):
        _ip("netns", "add", name)
        port = f"port{rank}"
        _ip("-n", bridge, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _ip("-n", bridge, "link", "set", port, "master", "bridge0", "up")
        _ip("-n", name, "address", "add", f"10.0.0.{rank + 1}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", INTERFACE, "up")
        limit = ("tbf", "rate", f"{rate_mbit:g}mbit", "burst", BURST, "latency", QUEUE)
        _call("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *limit)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        with suppress(OSError):  # it may not have come to exist
            _ip("netns", "delete", name)


def _remove_leftovers() -> None:
    """Namespaces of processes that were killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        prefix, _, rest = name.partition("-")
        process = rest.partition("-")[0]
        if prefix == PREFIX and process.isdigit() and not _runs(int(process)):
            _remove([name])


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _ends_orderly() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process by an exception, so that what was built is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ip(*words: str) -> str:
    return _call("ip", *words)


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}`: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
