"""Data sets by their name on the Hugging Face Hub, as the Arrow files that `datasets` keeps of them.

Downloading, caching and offline use are the business of `datasets`; here a name becomes files on disk, so that all that
follows is the same as for a saved data set. With streaming nothing is downloaded whole: each shard becomes an address
(`owner/name/train/00003-of-00012`) that is read row by row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from freight.data.read.records import Place, RawRecord
from freight.errors import DataError

SPLIT = re.compile(r"\w+([.-]\w+)*")


def hub_files(name: str, split: str) -> list[Path]:
    """The Arrow files of a data set, downloaded unless they are in the cache of `datasets`.

    Raises:
        DataError: It cannot be had, or has no such split.
    """
    files = [Path(entry["filename"]) for entry in load_from_hub(name, split, streaming=False).cache_files]
    if not files:
        raise DataError(f"{name}: `datasets` keeps no files of it; save it with save_to_disk and name the folder")
    return files


def hub_shards(name: str, split: str) -> list[Path]:
    """Addresses of the shards of a data set that is read from afar."""
    count = load_from_hub(name, split, streaming=True).num_shards
    return [Path(f"{name}/{split}/{index:05}-of-{count:05}") for index in range(count)]


def read_hub_shard(address: Path, after: int = -1) -> Iterator[RawRecord]:
    """Yield the rows of one shard; a null column counts as a missing key."""
    owner, name, split, part = address.parts
    index, count = map(int, part.split("-of-"))
    shard = load_from_hub(f"{owner}/{name}", split, streaming=True).shard(num_shards=count, index=index)
    skipped = max(0, after)
    try:
        for number, row in enumerate(shard.skip(skipped), start=skipped + 1):
            value = {key: item for key, item in row.items() if item is not None}
            yield RawRecord(Place(address, "hub", number), value, None, None, 0)
    except (OSError, ValueError) as error:
        raise DataError(f"{address}: {first_line(error)}") from None


def load_from_hub(name: str, split: str, *, streaming: bool) -> Any:
    """A data set of the Hub as `datasets` gives it.

    Raises:
        DataError: It cannot be had.
    """
    if SPLIT.fullmatch(split) is None:
        raise DataError(f"{name}: split must be a plain name such as train; got {split!r}. Cut with max_records")
    datasets = import_module("datasets")  # takes a second, and few runs need it
    try:
        return datasets.load_dataset(name, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name}: no such path, and not reachable as a Hub dataset (split {split}): {first_line(error)}"
        ) from None


def first_line(error: Exception) -> str:
    """What an error of a library says, as far as it fits in a line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
