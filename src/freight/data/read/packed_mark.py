"""What tells a packed file from other Arrow and Parquet files: one key in its metadata, read without reading a row."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

METADATA_KEY = b"freight"
SUFFIXES = (".arrow", ".parquet")


def is_packed(path: Path) -> bool:
    """Whether a file carries the metadata of a packed file, damaged or not."""
    if path.suffix not in SUFFIXES or not path.is_file():
        return False
    try:
        return METADATA_KEY in (_metadata(path) or {})
    except (pa.ArrowException, OSError):
        return False


def _metadata(path: Path) -> dict[bytes, bytes] | None:
    if path.suffix == ".parquet":
        return pq.read_metadata(path).metadata
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).schema.metadata
