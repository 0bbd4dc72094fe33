"""Folders that `datasets` writes (`save_to_disk`, or its cache): which Arrow files hold which split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freight.errors import DataError

SPLITS_FILE = "dataset_dict.json"
STATE_FILE = "state.json"
INFO_FILE = "dataset_info.json"


def is_saved_dataset(folder: Path) -> bool:
    """Whether a folder is one that `datasets` wrote."""
    return any((folder / name).is_file() for name in (SPLITS_FILE, STATE_FILE, INFO_FILE))


def saved_files(folder: Path, split: str | None) -> list[Path]:
    """The Arrow files of a split, in order.

    Args:
        folder: As `is_saved_dataset` knows it.
        split: A name; None = `train` where there are several, and the only one otherwise.

    Raises:
        DataError: There is no such split, or a file of it is missing.
    """
    if (folder / SPLITS_FILE).is_file():
        splits = _read(folder / SPLITS_FILE).get("splits", [])
        return saved_files(folder / _chosen(folder, splits, split), None)
    if (folder / STATE_FILE).is_file():
        state = _read(folder / STATE_FILE)
        if split not in (None, state.get("_split")):
            raise DataError(f"{folder}: it holds one data set and no split {split!r}; leave split out")
        if state.get("_indices_data_files"):
            raise DataError(f"{folder}: its rows are reordered by an index; save it again after flatten_indices()")
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    else:
        splits = list(_read(folder / INFO_FILE).get("splits") or {})
        chosen = _chosen(folder, splits, split) if splits else None
        found = sorted(folder.glob("*.arrow"))
        files = [file for file in found if chosen is None or _is_of(file, chosen)]
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        raise DataError(f"{missing[0] if missing else folder}: no such file; the saved data set is not whole")
    return files


def _chosen(folder: Path, splits: list[str], split: str | None) -> str:
    if split is None:
        split = splits[0] if len(splits) == 1 else "train"
    if split not in splits:
        raise DataError(f"{folder}: no split {split!r}; it has {', '.join(splits) or 'none'}: set split to one of them")
    return split


def _is_of(file: Path, split: str) -> bool:
    """`name-train.arrow` and `name-train-00000-of-00002.arrow` belong to the split `train`."""
    stem = file.stem
    head, of, _ = stem.rpartition("-of-")
    return (head.rpartition("-")[0] if of else stem).endswith(f"-{split}")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise DataError(f"{path}: not JSON; the saved data set is not whole")
    return value
