"""Files as bytes, whether plain or packed by gzip or Zstandard; an incomplete or damaged one is named, never cut short.

Both libraries end quietly when a file stops in the middle of a frame, so frames are counted here. Packed input is read
64 KiB at a time, which bounds memory by what that much can unpack to.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from freight.errors import DataError

BUFFER_BYTES = 1 << 20
PACKED_BYTES = 1 << 16
GZIP_FRAME = 31  # zlib's code for the largest window and a gzip header with its checksum
LARGEST_WINDOW = 1 << 31

UNPACKERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(GZIP_FRAME),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj(),
}


def is_compressed(path: Path) -> bool:
    """Whether a file has to be unpacked while it is read."""
    return path.suffix.lower() in UNPACKERS


def open_bytes(path: Path) -> tuple[BinaryIO, Callable[[], int]]:
    """Open a file for reading from its front.

    Returns:
        The unpacked bytes, and a function that tells how many bytes of the file have been read, for progress.

    Raises:
        DataError: While reading, if the file is incomplete or damaged.
    """
    if not is_compressed(path):
        file = path.open("rb", buffering=BUFFER_BYTES)
        return file, file.tell
    unpacked = UnpackedStream(path)
    return io.BufferedReader(unpacked, BUFFER_BYTES), unpacked.packed_position


class UnpackedStream(io.RawIOBase):
    """What a packed file holds; several frames in a row are one stream.

    Args:
        path: Ends in one of `UNPACKERS`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new_frame = UNPACKERS[path.suffix.lower()]
        self._frame = self._new_frame()
        self._inside = False
        self._packed = b""
        self._ready = memoryview(b"")
        self._bytes = 0
        self._lines = 0
        self._file = path.open("rb")

    def packed_position(self) -> int:
        """Bytes of the packed file read so far."""
        return self._file.tell()

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, as files do; 0 at the end."""
        while not self._ready:
            packed = self._packed or self._file.read(PACKED_BYTES)
            if not packed:
                if self._inside:
                    raise DataError(f"{self._where()}: the file is incomplete; fetch or pack it again")
                return 0
            self._unpack(packed)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def _unpack(self, packed: bytes) -> None:
        if not self._inside:
            packed = packed.lstrip(b"\0")  # padding between frames, as gzip allows it
        if not packed:
            self._packed = b""
            return
        try:
            content = self._frame.decompress(packed)
        except (zlib.error, zstandard.ZstdError) as error:
            raise DataError(f"{self._where()}: the packed data are damaged ({error}); fetch or pack it again") from None
        self._inside, self._packed = not self._frame.eof, b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, self._new_frame()
        self._bytes += len(content)
        self._lines += content.count(b"\n")
        self._ready = memoryview(content)

    def _where(self) -> str:
        return f"{self._path}: after {self._lines:,} lines ({self._bytes:,} bytes unpacked)"
