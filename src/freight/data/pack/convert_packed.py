"""Packed files from one format to another, and NeMo's `.npy` files opened for training.

Arrow and Parquet say the same about themselves. An `.npy` file holds rows and nothing else: what it means by its mask,
how long its rows are and which tokenizer made them must be told, and is asked for.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

import freight
from freight.data.pack.npy_file import SUFFIX, NpyFile, NpyMask, check_npy_mask
from freight.data.pack.packed_file import FORMAT, VERSION, PackedFile
from freight.data.pack.packed_writer import FORMATS, Progress, packed_in_memory, write_packed
from freight.data.read.packed_mark import is_packed
from freight.data.render.tokenizer import digest, pad_id, tokenizer_hash
from freight.errors import ConfigError, DataError

IMPORTED = "imported"  # the algorithm of rows that somebody else packed
CACHE_VERSION = 1


def convert(
    source: Path,
    output: Path,
    *,
    npy_mask: str | None = None,
    pack_size: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the rows of a packed file in another format; the suffixes decide which.

    Args:
        source: An `.arrow`, `.parquet` or `.npy` file.
        output: The same, of another name.
        npy_mask: What the `loss_mask` of an `.npy` file means, `token` or `label`; needed for both directions.
        pack_size: Tokens of a row; needed for an `.npy` source, which does not say.
        tokenizer: That made the ids of an `.npy` source; None = its hash stays unknown and is never compared.
        force: Overwrite `output`.
        progress: Called with rows done, rows in all, and a word.

    Returns:
        The metadata of the rows, of which an `.npy` file holds nothing.

    Raises:
        ConfigError: Something an `.npy` file does not say is missing, or an option has no effect.
        DataError: The source cannot be used, or the output cannot hold it.
    """
    mask = check_npy_mask(npy_mask, "--npy-mask") if SUFFIX in (source.suffix, output.suffix) else None
    _check_convert(source, output, npy_mask, pack_size, tokenizer, force)
    if source.suffix == SUFFIX:
        assert mask is not None
        rows = NpyFile(source, mask, None if tokenizer is None else pad_id(tokenizer))
        metadata = npy_metadata(rows, pack_size, "--pack-sizes", tokenizer, progress)
    else:
        rows = PackedFile(source)
        metadata = rows.metadata
    write_packed(output, rows, metadata, npy_mask=mask, progress=progress)
    return metadata


def _check_convert(
    source: Path,
    output: Path,
    npy_mask: str | None,
    pack_size: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
    force: bool,
) -> None:
    faults = []
    if output.suffix.removeprefix(".") not in FORMATS:
        faults.append(f"`--output` must end in .arrow, .parquet or .npy with `--convert`; got {output}.")
    if npy_mask is not None and SUFFIX not in (source.suffix, output.suffix):
        faults.append("`--npy-mask` has no effect: neither file is an .npy file. Remove it.")
    if source.suffix != SUFFIX:
        for option, value in (("--pack-sizes", pack_size), ("--tokenizer", tokenizer)):
            if value is not None:
                faults.append(f"`{option}` has no effect: {source} says it itself. Remove it.")
    if output.exists() and output.resolve() == source.resolve():
        faults.append(f"`--output` {output} is the file to convert itself. Give another name.")
    elif output.exists() and not force:
        faults.append(f"{output} exists. Use --force to overwrite it.")
    if faults:
        raise ConfigError(*faults)


def npy_metadata(
    file: NpyFile,
    pack_size: int | None,
    key: str | None,
    tokenizer: PreTrainedTokenizerBase | None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """What a packed file would say of an `.npy` file's rows, by one pass over all of them.

    Args:
        file: The file.
        pack_size: Tokens of a row.
        key: What the user sets it by; None = the fullest row counts where it is not given.
        tokenizer: That made the ids, where it is known.
        progress: See `convert`.

    Raises:
        ConfigError: No `pack_size`.
        DataError: A row that cannot be, or that does not fit.
    """
    documents, tokens, targets, most, longest, fullest, largest_id = 0, 0, 0, 0, 0, 0, -1
    vocabulary = None if tokenizer is None else len(tokenizer)
    for number, row in enumerate(file):
        where = f"{file.path}: row {number}"
        largest = int(max(row.ids.max(), row.tail_labels.max()))
        if vocabulary is not None and largest >= vocabulary:
            raise DataError(f"{where}: id {largest} is outside the tokenizer's {vocabulary:,}. Name the one it had.")
        if pack_size is not None and row.num_tokens > pack_size:
            raise DataError(f"{where}: has {row.num_tokens:,} tokens, more than {key} {pack_size}. Give its own size.")
        documents += len(row.lengths)
        tokens += row.num_tokens
        targets += row.num_targets
        most, longest = max(most, len(row.lengths)), max(longest, int(row.lengths.max()))
        fullest, largest_id = max(fullest, row.num_tokens), max(largest_id, largest)
        if progress:
            progress(number + 1, len(file), f"read {file.path.name}")
    if not len(file):
        raise DataError(f"{file.path}: holds no rows.")
    if pack_size is None and key is not None:
        raise ConfigError(
            f"`{key}` is missing: an .npy file does not say how long its rows are. The fullest of {file.path} has "
            f"{fullest:,} tokens; give the size that it was packed with."
        )
    pack_size = fullest if pack_size is None else pack_size
    content = _content_hash(file.path)
    notices, warnings = _remarks(file, tokenizer is not None)
    return {
        "format": FORMAT,
        "version": VERSION,
        "pack_size": pack_size,
        "algorithm": IMPORTED,
        "seed": None,
        "document_multiple": 1,
        "mask_alignment": "token",
        "sequence_length": pack_size,
        "truncation": None,
        "tokenizer_hash": None if tokenizer is None else tokenizer_hash(tokenizer),
        "template_hash": None,
        "vocab_size": largest_id + 1 if vocabulary is None else vocabulary,
        "pad_id": 0 if tokenizer is None else pad_id(tokenizer),
        "num_target_tokens": targets,
        "sources": [{"path": str(file.path), "hash": content, "records": len(file)}],
        "skipped": {},
        "num_documents": documents,
        "num_rows": len(file),
        "num_tokens": tokens,
        "packing_factor": documents / len(file),
        "efficiency": tokens / (len(file) * pack_size),
        "fill": -(-tokens // pack_size) / len(file),
        "max_documents_per_row": most,
        "max_length": longest,
        "fingerprint": content,
        "notices": notices,
        "warnings": warnings,
        "freight": freight.__version__,
    }


def _remarks(file: NpyFile, pad_known: bool) -> tuple[list[str], list[str]]:
    """Notices and warnings on rows that have been read."""
    notices, warnings = [], []
    if file.unread_keys:
        notices.append(f"{file.path}: rows also have {', '.join(sorted(file.unread_keys))}, which nothing reads")
    if not pad_known:
        notices.append(f"{file.path}: without a tokenizer, pads that are marked as targets cannot be looked for")
    if file.padded_rows:
        warnings.append(
            f"{file.path}: {file.padded_rows:,} of {len(file):,} rows have a sequence that ends in several targets "
            "with the pad id; they may be padding that the converter took for targets"
        )
    return notices, warnings


def open_npy(
    path: Path,
    mask: NpyMask,
    pack_size: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
    cache_dir: str | None,
    progress: Progress | None = None,
) -> PackedFile:
    """An `.npy` file as a packed file with random rows: converted once into the cache, or into memory without one.

    Args:
        path: The file.
        mask: What its `loss_mask` means.
        pack_size: Tokens of a row.
        tokenizer: The run's; its ids must be the file's.
        cache_dir: `data.cache_dir`.
        progress: See `convert`.

    Raises:
        ConfigError: No `pack_size`.
        DataError: A row that cannot be used, or a cache that cannot be written.
    """
    file = NpyFile(path, mask, None if tokenizer is None else pad_id(tokenizer))
    if cache_dir is None:
        metadata = npy_metadata(file, pack_size, "data.packing.pack_size", tokenizer, progress)
        return PackedFile(path, packed_in_memory(file, metadata, progress))
    made_by = None if tokenizer is None else tokenizer_hash(tokenizer)
    key = digest([CACHE_VERSION, _content_hash(path), mask, pack_size, made_by])
    stored = Path(cache_dir).expanduser() / "packed" / f"{key}.arrow"
    if not is_packed(stored):
        metadata = npy_metadata(file, pack_size, "data.packing.pack_size", tokenizer, progress)
        try:
            write_packed(stored, file, metadata, progress=progress)
        except OSError as error:
            raise DataError(f"data.cache_dir {cache_dir}: {error.strerror}; set data.cache_dir elsewhere") from None
    return PackedFile(path, pa.memory_map(str(stored)).read_buffer())


def _content_hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
