"""From what the config names to a list of files, in an order that no file system decides.

Folders and globs are sorted bytewise by relative path. What cannot be read is refused here, before any file is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from freight.config.schema import DataConfig, Format, Source
from freight.data.readers import COMPRESSED, KINDS
from freight.errors import DataError

SHOWN_NAMES = 5


@dataclass(frozen=True)
class SourceFiles:
    """One source, resolved.

    Args:
        name: Unique among the sources of a run; names its rejects file and its share of a loss.
        path: As the user wrote it.
        files: In reading order.
        kind: Reader of all of them: `jsonl`, `json`, `parquet` or `text`.
        format: Record format, or `auto`.
        fields: Canonical field name -> column.
        max_records: Records read at most.
    """

    name: str
    path: str
    files: tuple[Path, ...]
    kind: str
    format: Format
    fields: dict[str, str]
    max_records: int | None


def resolve_sources(entries: str | Sequence[str | Source], config: DataConfig) -> list[SourceFiles]:
    """Find the files of every source.

    Args:
        entries: `data.train` or `data.validation`.
        config: Its `format` and `fields` hold where a source has none of its own.

    Raises:
        DataError: A source that does not exist, matches nothing, mixes kinds, or needs what is not supported.
    """
    entries = [entries] if isinstance(entries, str) else entries
    sources = [Source.model_validate({"path": entry}) if isinstance(entry, str) else entry for entry in entries]
    if not sources:
        raise DataError("no data source is given; name a file, folder or glob in data.train")
    resolved: list[SourceFiles] = []
    for source in sources:
        if source.weight is not None:
            raise DataError(f"{source.path}: weights of sources are not supported (got {source.weight}); leave it out")
        if source.split != "train":
            raise DataError(
                f"{source.path}: split {source.split!r} has no effect on local files; name the file instead"
            )
        files = find_files(source.path)
        resolved.append(
            SourceFiles(
                name=unique_name(source.name or Path(source.path).stem, [s.name for s in resolved]),
                path=source.path,
                files=tuple(files),
                kind=common_kind(files, source.path),
                format=source.format or config.format,
                fields={**config.fields, **source.fields},
                max_records=source.max_records,
            )
        )
    return resolved


def find_files(path: str) -> list[Path]:
    """Files of a path, folder or glob, sorted bytewise by relative path.

    Raises:
        DataError: There are none.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        if (place / "dataset_info.json").exists() or (place / "state.json").exists():
            raise DataError(
                f"{path}: Arrow folders of `datasets` are not supported; save it with to_parquet or to_json"
            )
        return files_of_folder(place)
    if any(character in path for character in "*?["):
        found = Path(place.anchor).glob(str(place.relative_to(place.anchor)))
        files = sorted((f for f in found if f.is_file()), key=lambda file: str(file).encode())
        if not files:
            folder = glob_folder(place)
            raise DataError(f"no file matches {path!r}; {folder} has {first_names(folder)}")
        return files
    raise DataError(
        f"{path}: no such file or folder (names on the Hugging Face hub are not supported: download it first)"
    )


def files_of_folder(folder: Path) -> list[Path]:
    """All readable files below a folder; hidden ones are passed over."""
    below = [
        f for f in folder.rglob("*") if f.is_file() and not any(p.startswith(".") for p in f.relative_to(folder).parts)
    ]
    files = [f for f in below if f.suffix.lower() in (*KINDS, *COMPRESSED)]
    if not files:
        raise DataError(f"{folder}: no data files ({', '.join(KINDS)}) in it; it has {first_names(folder)}")
    return sorted(files, key=lambda file: str(file.relative_to(folder)).encode())


def common_kind(files: Sequence[Path], path: str) -> str:
    """The one kind of reader that all files of a source need.

    Raises:
        DataError: An unknown or compressed file, or several kinds.
    """
    for file in files:
        if file.suffix.lower() in COMPRESSED:
            raise DataError(f"{file}: compressed files are not supported; decompress it first")
        if file.suffix.lower() not in KINDS:
            raise DataError(f"{file}: unknown kind {file.suffix!r}; expected one of {', '.join(KINDS)}")
    first_of: dict[str, Path] = {}
    for file in files:
        first_of.setdefault(KINDS[file.suffix.lower()], file)
    if len(first_of) > 1:
        examples = ", ".join(f"{kind} ({file.name})" for kind, file in first_of.items())
        raise DataError(f"{path}: files of several kinds: {examples}; choose with a glob such as {path}/*.jsonl")
    return next(iter(first_of))


def unique_name(name: str, taken: Sequence[str]) -> str:
    """A file-name-safe source name that no earlier source has."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip("_") or "data"
    candidates = [safe, *(f"{safe}-{n}" for n in range(2, len(taken) + 2))]
    return next(candidate for candidate in candidates if candidate not in taken)


def glob_folder(pattern: Path) -> Path:
    """The deepest folder of a pattern that is not itself a pattern and exists."""
    folder = pattern
    while any(c in str(folder) for c in "*?[") or not folder.is_dir():
        folder = folder.parent
    return folder


def first_names(folder: Path) -> str:
    """A few names in a folder, for an error message."""
    names = sorted(child.name for child in folder.iterdir())
    if not names:
        return "nothing"
    shown = ", ".join(names[:SHOWN_NAMES])
    return shown if len(names) <= SHOWN_NAMES else f"{shown} and {len(names) - SHOWN_NAMES} more"
