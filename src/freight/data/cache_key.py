"""What decides tokenised documents, as one key: content of files, tokenizer, template and rules.

Files count by content, not by date: a touched file hits the cache, an edited one of equal size does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from freight.config.schema import DataConfig
from freight.data.sources import SourceFiles
from freight.data.template import ChatTemplate
from freight.data.tokenizer import digest, tokenizer_hash

CACHE_VERSION = 1
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


def hash_files(sources: Sequence[SourceFiles]) -> dict[Path, str]:
    """BLAKE2b of every file's content."""
    hashes: dict[Path, str] = {}
    for path in (path for source in sources for path in source.files):
        with path.open("rb") as file:
            hashes[path] = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return hashes


def combined_hash(hashes: Sequence[str]) -> str:
    """One hash of several files, in order."""
    return hashes[0] if len(hashes) == 1 else digest(list(hashes))
