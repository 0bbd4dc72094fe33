"""What decides tokenised documents, as one key: content of files, tokenizer, template and rules.

Files count by content, not by date: a touched file hits the cache, an edited one of equal size does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from freight.config.schema import DataConfig
from freight.data.read.sources import SourceFiles
from freight.data.render.template import ChatTemplate
from freight.data.render.tokenizer import digest, tokenizer_hash
from freight.data.tokens.build_folder import replace_text

CACHE_VERSION = 2
SETTLED_NANOSECONDS = 2_000_000_000
RULES = (
    "train_on",
    "sequence_length",
    "truncation",
    "bos",
    "eos",
    "assistant_start",
    "assistant_end",
    "on_bad_record",
    "max_skipped_fraction",
)


def cache_key(
    sources: Sequence[SourceFiles],
    hashes: dict[Path, str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate | None,
    vocab_size: int,
) -> str:
    """Key of a cache entry; equal keys mean equal documents, rejects and messages."""
    return digest(
        {
            "version": CACHE_VERSION,
            "sources": [
                [
                    source.name,
                    source.path,
                    source.kind,
                    [[str(path), hashes[path]] for path in source.files],
                    source.format,
                    source.fields,
                    source.max_records,
                ]
                for source in sources
            ],
            "tokenizer": tokenizer_hash(tokenizer),
            "template": template.hash if template else None,
            "rules": {name: getattr(config, name) for name in RULES},
            "vocab_size": vocab_size,
        }
    )


def hash_files(
    sources: Sequence[SourceFiles], cache: Path | None = None, progress: Callable[[int, int, str], None] | None = None
) -> dict[Path, str]:
    """BLAKE2b of every file's content.

    Args:
        sources: Whose files.
        cache: Folder that remembers hashes of files that have not changed since; None = none is remembered.
        progress: Told of bytes.
    """
    paths = [path for source in sources for path in source.files]
    total, done = sum(path.stat().st_size for path in paths), 0
    hashes: dict[Path, str] = {}
    for path in paths:
        if path not in hashes:
            hashes[path] = remembered_hash(path, cache / "hashes") if cache else hash_file(path)
        done += path.stat().st_size
        if progress:
            progress(done, total, "hashing")
    return hashes


def hash_file(path: Path) -> str:
    """BLAKE2b of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def remembered_hash(path: Path, memory: Path) -> str:
    """The hash of a file, read only if its stamp is not the remembered one.

    A file written within the last seconds is not remembered: it could change again without a new stamp.
    """
    entry = memory / f"{digest(str(path.resolve()))}.json"
    stamp = stamp_of(path)
    try:
        known = json.loads(entry.read_text(encoding="utf-8"))
        if known["stamp"] == stamp:
            return known["hash"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    began = time.time_ns()
    found = hash_file(path)
    if stamp_of(path) == stamp and max(stamp[1:3]) < began - SETTLED_NANOSECONDS:
        with contextlib.suppress(OSError):  # a cache that cannot be written is reported where it is needed
            memory.mkdir(parents=True, exist_ok=True)
            replace_text(entry, json.dumps({"path": str(path), "stamp": stamp, "hash": found}))
    return found


def stamp_of(path: Path) -> list[int]:
    """Size, times and inode: what a write changes. The time of change cannot be set back by a program."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def combined_hash(hashes: Sequence[str]) -> str:
    """One hash of several files, in order."""
    return hashes[0] if len(hashes) == 1 else digest(list(hashes))
