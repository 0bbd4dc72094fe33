"""A pool of spawned gloo ranks that stay alive between calls.

Starting ranks costs seconds each (they import torch); a call on a living pool costs a file store and a group, tens of
milliseconds. A call that hangs is killed after its timeout, and the next call starts a fresh pool.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# After one rank has failed, the others may sit in a collective that will never complete.
GRACE_SECONDS = 5.0
START_SECONDS = 300.0


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time; the message starts with the first rank's own words."""

    @property
    def summary(self) -> str:
        """One line: which rank failed first, and with what."""
        first = str(self).partition("\nrank ")[0].strip().split("\n")
        rank, colon, rest = first[0].partition(": ")
        return f"{rank} failed: {first[-1].strip() if len(first) > 1 else rest}" if colon else first[0]


class RankPool:
    """Up to `size` ranks, one thread each.

    Args:
        size: Largest world that can be asked for.
        timeout_seconds: Per call, unless a call says otherwise.
    """

    def __init__(self, size: int = 4, timeout_seconds: float = 120.0) -> None:
        self._size = size
        self._timeout_seconds = timeout_seconds
        self._ranks: list[tuple[BaseProcess, Any]] = []

    def run(
        self, function: Callable[..., Any], world: int, *args: Any, timeout_seconds: float | None = None
    ) -> list[Any]:
        """Call `function(*args)` on ranks `0 .. world - 1`, inside a default process group of that size.

        Args:
            function: Importable by name, as are the types of its arguments and result.
            world: Number of ranks.
            *args: The same on all ranks.
            timeout_seconds: For this call.

        Returns:
            What each rank returned, in order.

        Raises:
            RankError: One rank failed; the pool is then started anew by the next call.
        """
        if not 1 <= world <= self._size:
            raise ValueError(f"`world` must be 1 to {self._size}, the size of the pool; got {world}.")
        self._grow(world)
        with tempfile.TemporaryDirectory() as folder:
            seconds = timeout_seconds or self._timeout_seconds
            call = pickle.dumps((sys.path, function, args))
            for rank, (_, connection) in enumerate(self._ranks[:world]):
                connection.send((call, rank, world, f"{folder}/store", seconds))
            return self._collect(world, seconds)

    def close(self) -> None:
        """End all ranks."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks.clear()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grow(self, world: int) -> None:
        """Start missing ranks side by side, and wait until all have imported what they need."""
        new = [_start() for _ in range(world - len(self._ranks))]
        self._ranks += new
        for _, connection in new:
            if not connection.poll(START_SECONDS):
                self.close()
                raise RankError(f"a rank did not start within {START_SECONDS:g} s")
            connection.recv_bytes()

    def _collect(self, world: int, seconds: float) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks[:world])}
        results: list[Any] = [None] * world
        failures: list[str] = []
        deadline = time.monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                hanging = sorted(waiting.values())
                failures.append(f"ranks {hanging} did not finish within {seconds:g} s")
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    done, results[rank] = pickle.loads(self._ranks[rank][1].recv_bytes())
                except (EOFError, OSError):
                    done, results[rank] = False, "the process died"
                if not done:
                    if not failures:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    failures.append(f"rank {rank}: {results[rank]}")
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        return results


def _start() -> tuple[BaseProcess, Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def _serve(connection: Any) -> None:
    """A rank's life: take a call, run it in a process group of its own, send back what came of it."""
    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            call, rank, world, store, seconds = connection.recv()
        except EOFError:
            return
        try:
            path, function, args = pickle.loads(call)
            sys.path[:] = path
            answer = True, _in_group(function, args, rank, world, Path(store), seconds)
        except BaseException:  # whatever it is, the parent must hear of it
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))


def _in_group(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, store: Path, seconds: float
) -> Any:
    # On a machine with GPUs groups take tensors of both devices; what is made for CUDA is made when it is first used.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(store), world),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
