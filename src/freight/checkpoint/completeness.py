"""The COMPLETE file: every other file of a saved state with its size and CRC-32, written last.

CRC-32 is there against damage, not against malice. It runs three times as fast as BLAKE2b (0.8 against 0.27 GiB/s on
one busy core), so checking a checkpoint before each resume costs little.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from freight.checkpoint.tensor_files import read_json
from freight.errors import CheckpointError

MARKER = "COMPLETE"
FORMAT = 1
PIECE_BYTES = 1 << 22


def mark_complete(folder: Path) -> None:
    """Describe every file of the folder in its COMPLETE file."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": _crc32(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MARKER).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))


def verify(folder: str | Path, *, contents: bool = True) -> None:
    """Check a saved state against its COMPLETE file.

    Args:
        folder: The `step-...` folder.
        contents: Read every byte; False compares names and sizes only.

    Raises:
        CheckpointError: Not a finished saved state, or a file is missing or damaged; names the file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"`{folder}` does not exist.")
    if not (folder / MARKER).exists():
        raise CheckpointError(f"`{folder}` has no {MARKER}: it is not a saved state, or its save was interrupted.")
    promised = read_json(folder / MARKER)
    if promised.get("format") != FORMAT or not isinstance(promised.get("files"), dict):
        raise CheckpointError(
            f"`{folder / MARKER}` has format {promised.get('format')!r}; this version reads {FORMAT}."
        )
    for name, facts in promised["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"`{path}` is missing.")
        if path.stat().st_size != facts["bytes"]:
            raise CheckpointError(f"`{path}` is damaged: {path.stat().st_size} bytes instead of {facts['bytes']}.")
        if contents and _crc32(path) != facts["crc32"]:
            raise CheckpointError(f"`{path}` is damaged: its contents do not match the checksum in {MARKER}.")


def is_complete(folder: Path) -> bool:
    """Whether a folder is a finished saved state with all its files, by names and sizes."""
    try:
        verify(folder, contents=False)
    except CheckpointError:
        return False
    return True


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            value = zlib.crc32(piece, value)
    return value
