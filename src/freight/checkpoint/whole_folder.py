"""Folders that appear whole or not at all.

Files are written into a hidden folder beside the target, flushed to disk, and renamed in one step. A reader never sees
half a folder, and a crash leaves only the hidden one, whose name tells what it is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".freight-unfinished"
REPLACED = ".freight-replaced"


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write into; it becomes `target`, replacing what stands there, when the block ends without an error.

    What an earlier, interrupted attempt left is removed first; what it had moved away comes back. After an error
    nothing new is left, and `target` is what it was.
    """
    unfinished = target.with_name(f".{target.name}{UNFINISHED}")
    replaced = target.with_name(f".{target.name}{REPLACED}")
    if replaced.exists() and not target.exists():
        replaced.rename(target)  # an earlier attempt died between its two renames
    for leftover in (unfinished, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for path in [*unfinished.rglob("*"), unfinished]:
            flush(path)
        if target.exists():
            target.rename(replaced)
        unfinished.rename(target)
        flush(target.parent)
    except BaseException:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def unfinished_folders(directory: Path) -> list[Path]:
    """What interrupted attempts left in a directory."""
    return sorted(path for path in directory.glob(f".*{UNFINISHED}") if path.is_dir())


def flush(path: Path) -> None:
    """Wait until a file or a folder's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
