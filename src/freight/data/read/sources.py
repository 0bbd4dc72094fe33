"""From what the config names to a list of files, in an order that no file system decides.

Folders and globs are sorted bytewise by relative path. What cannot be read is refused here, before any file is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from freight.config.checks import is_hub_name
from freight.config.schema import DataConfig, Format, Source
from freight.data.read.compressed import UNPACKERS, is_compressed
from freight.data.read.hub import hub_files, hub_shards
from freight.data.read.packed_mark import SUFFIXES, is_packed
from freight.data.read.readers import KINDS, TEXT_RECORDS
from freight.data.read.saved_datasets import is_saved_dataset, saved_files
from freight.errors import DataError

COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
SHOWN_NAMES = 5


@dataclass(frozen=True)
class SourceFiles:
    """One source, resolved.

    Args:
        name: Unique among the sources of a run; names its rejects file and its share of a loss.
        path: As the user wrote it.
        files: In reading order.
        kind: Reader of all of them, see `read_file`.
        format: Record format, or `auto`.
        fields: Canonical field name -> column.
        max_records: Records read at most.
        weight: Share of documents, relative to the other sources; None = every record once.
    """

    name: str
    path: str
    files: tuple[Path, ...]
    kind: str
    format: Format
    fields: dict[str, str]
    max_records: int | None
    weight: float | None = None


def resolve_sources(entries: str | Sequence[str | Source], config: DataConfig) -> list[SourceFiles]:
    """Find the files of every source.

    Args:
        entries: `data.train` or `data.validation`.
        config: Its `format` and `fields` hold where a source has none of its own.

    Raises:
        DataError: A source that does not exist, matches nothing, mixes kinds, or has an option without effect.
    """
    entries = [entries] if isinstance(entries, str) else entries
    sources = [Source.model_validate({"path": entry}) if isinstance(entry, str) else entry for entry in entries]
    if not sources:
        raise DataError("no data source is given; name a file, folder or glob in data.train")
    resolved: list[SourceFiles] = []
    for source in sources:
        files, kind = find_files(source, streaming=config.streaming)
        fields = {**config.fields, **source.fields}
        record = fields.pop("record", None)
        if any(map(is_compressed, files)) and config.cache_dir is None and not config.streaming:
            refuse_uncached(source, files)
        resolved.append(
            SourceFiles(
                name=unique_name(source.name or short_name(source.path), [s.name for s in resolved]),
                path=source.path,
                files=tuple(files),
                kind=kind if record is None else kind_of_record(record, kind, source.path),
                format=source.format or config.format,
                fields=fields,
                max_records=source.max_records,
                weight=source.weight,
            )
        )
    return resolved


def refuse_uncached(source: Source, files: Sequence[Path]) -> None:
    """Compressed files have no random access, so they are read once into the cache; a few records fit in memory.

    Raises:
        DataError: There is neither a cache nor a bound.
    """
    if source.max_records is None:
        packed = next(file for file in files if is_compressed(file))
        raise DataError(
            f"{packed}: a compressed file is read once into the cache; set data.cache_dir or data.streaming"
        )


def kind_of_record(record: str, kind: str, path: str) -> str:
    """The reader for records smaller than a file, which only text has.

    Raises:
        DataError: Another kind of file, or of record.
    """
    if kind != "text":
        raise DataError(f"{path}: data.fields record cuts text files, these are {kind}; leave it out")
    if record not in TEXT_RECORDS:
        raise DataError(f"{path}: data.fields record must be line or paragraph; got {record!r}")
    return record


def find_files(source: Source, *, streaming: bool = False) -> tuple[list[Path], str]:
    """Files of a path, folder, glob or Hub name, sorted bytewise by relative path, and the reader of all of them.

    Args:
        source: What to look for.
        streaming: Names of the Hub become addresses of shards, and nothing is downloaded.

    Raises:
        DataError: There are none, they cannot be read, or an option has no effect on them.
    """
    path, place = source.path, Path(source.path).expanduser()
    if source.glob is not None and not place.is_dir():
        raise DataError(f"{path}: glob chooses among the files of a folder, and this is none; leave it out")
    if place.is_dir() and is_saved_dataset(place):
        if source.glob is not None:
            raise DataError(f"{path}: glob has no effect on a saved data set; choose with split")
        return saved_files(place, source.split), "arrow"
    if not place.exists() and is_hub_name(path):
        split = source.split or "train"
        return (hub_shards(path, split), "hub") if streaming else (hub_files(path, split), "arrow")
    if source.split is not None:
        raise DataError(f"{path}: split {source.split!r} has no effect on plain files; name the file instead")
    files = local_files(place, source)
    return files, common_kind(files, path)


def local_files(place: Path, source: Source) -> list[Path]:
    """Plain files of a path, folder or glob."""
    if place.is_file():
        return [place]
    if place.is_dir():
        return files_of_folder(place) if source.glob is None else matches(place, source.glob, place)
    if any(character in source.path for character in "*?["):
        return matches(Path(place.anchor), str(place.relative_to(place.anchor)), glob_folder(place), source.path)
    raise DataError(f"{source.path}: no such file or folder")


def matches(root: Path, pattern: str, shown: Path, named: str | None = None) -> list[Path]:
    """Files that a pattern matches.

    Args:
        root: Where the pattern begins.
        pattern: May hold `**`.
        shown: Folder whose first names are listed if there is no match.
        named: The pattern as the user wrote it.

    Raises:
        DataError: There is no match.
    """
    try:
        files = sorted((f for f in root.glob(pattern) if f.is_file()), key=lambda file: str(file).encode())
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"glob {pattern!r}: {error}; write for example *.jsonl") from None
    if not files:
        raise DataError(f"no file matches {named or pattern!r}; {shown} has {first_names(shown)}")
    return files


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
    first_of: dict[str, Path] = {}
    for file in files:
        first_of.setdefault(kind_of(file), file)
    if len(first_of) > 1:
        examples = ", ".join(f"{kind} ({file.name})" for kind, file in first_of.items())
        raise DataError(f"{path}: files of several kinds: {examples}; choose with `glob`, for example glob: '*.jsonl'")
    return next(iter(first_of))


def kind_of(file: Path) -> str:
    """Kind of reader that a file needs.

    Raises:
        DataError: None reads it.
    """
    suffix = file.suffix.lower()
    if suffix in COMPRESSED:
        inner = KINDS.get(Path(file.stem).suffix.lower())
        if suffix not in UNPACKERS or inner != "jsonl":
            raise DataError(f"{file}: only .jsonl.gz and .jsonl.zst are read compressed; decompress it first")
        return inner
    if suffix not in KINDS:
        raise DataError(f"{file}: unknown kind {file.suffix!r}; expected one of {', '.join(KINDS)}")
    if suffix in SUFFIXES and is_packed(file):
        raise DataError(f"{file}: a packed file holds rows, not records; name it alone, as data.packing.file")
    return KINDS[suffix]


def short_name(path: str) -> str:
    """Last part of a path, without what says its kind: `data/chats-*.jsonl.gz` -> `chats-*`."""
    name = Path(path).name or Path(path).absolute().name
    while Path(name).suffix.lower() in (*KINDS, *COMPRESSED):
        name = Path(name).stem
    return name


def unique_name(name: str, taken: Sequence[str]) -> str:
    """A file-name-safe source name that no earlier source has."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip("_-.") or "data"
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
