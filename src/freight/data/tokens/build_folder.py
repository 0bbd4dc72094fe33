"""Where a cache entry is made: one builder at a time, and an interrupted build goes on behind its last shard.

The lock is the operating system's, on an open file: it ends with its process, however that ends, so it is never stale.
The folder is this machine's own, since locks of shared file systems do not always reach other machines.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freight.errors import DataError

STATE_FILE = "state.json"
POLL_SECONDS = 0.2


def building_folder(cache: Path, key: str) -> Path:
    """Folder in which this machine makes the entry of a key."""
    return cache / "building" / f"{key}-{platform.node() or 'node'}"


@contextmanager
def one_builder(folder: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the right to build in a folder; wait while another process has it.

    Args:
        folder: From `building_folder`; the lock stands beside it.
        waiting: Told the id of the process that builds, again and again.

    Raises:
        DataError: The file system has no locks.
    """
    path = folder.with_name(f"{folder.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("a+", encoding="ascii")
        if try_lock(file.fileno(), path) and is_same_file(file.fileno(), path):
            break
        file.seek(0)
        waiting(file.read() or "of another start")
        file.close()
        time.sleep(POLL_SECONDS)
    try:
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def try_lock(descriptor: int, path: Path) -> bool:
    """Take the lock if it is free.

    Raises:
        DataError: The file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            return False
        raise DataError(f"{path}: cannot be locked ({error.strerror}); set data.cache_dir to a local folder") from None
    return True


def is_same_file(descriptor: int, path: Path) -> bool:
    """Whether a lock file is still the one at its path: whoever held it before has removed it at the end."""
    mine = os.fstat(descriptor)
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def read_state(folder: Path) -> dict[str, Any] | None:
    """What the last finished shard left behind; None if there is none, or none that can be read."""
    try:
        return json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Replace the state at once: a reader finds the old one or the new one."""
    replace_text(folder / STATE_FILE, json.dumps(state))


def replace_text(path: Path, text: str) -> None:
    """Write a file that is never seen half written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def publish(folder: Path, final: Path) -> None:
    """Give a finished folder its final name; if another machine was first, its folder stays.

    Args:
        folder: Complete.
        final: On the same file system.
    """
    (folder / STATE_FILE).unlink(missing_ok=True)
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(folder, ignore_errors=True)
