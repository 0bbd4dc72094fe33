"""What must hold between the keys of `data`, without reading any file; see `checks.py`.

Where a key could name packed rows or text to tokenise, only the file's content tells. What cannot be decided here is
left to the opening of the data, which asks the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator

from freight.config.schema import DataConfig, Source
from freight.errors import ConfigError

CHAT_FORMATS = ("messages", "conversations", "prompt_completion", "alpaca")
WITHOUT_TURNS = ("text",)  # formats that may be cut anywhere


def pack_size(data: DataConfig) -> int:
    """Tokens of a row, as far as the configuration says.

    Raises:
        ConfigError: Only a packed file can tell.
    """
    size = known_pack_size(data)
    if size is None:
        raise ConfigError("`data.sequence_length` is missing. Set it, or `data.packing.pack_size`, in tokens.")
    return size


def longest_document(data: DataConfig) -> int:
    """Tokens that a document may have; every configuration that tokenises something says it."""
    if data.sequence_length is None:
        raise ConfigError("`data.sequence_length` is missing. Set it to the longest document, in tokens.")
    return data.sequence_length


def algorithm(data: DataConfig, record_format: str | None = None) -> str:
    """Packing algorithm, defaults resolved.

    Args:
        data: The section.
        record_format: Format of the records; by default the configuration's, where `auto` counts as chat.

    Raises:
        ConfigError: `split` would cut conversations that have been seen.
    """
    if data.packing is None:
        return "none"
    whole = (record_format or data.format) not in WITHOUT_TURNS
    chosen = data.packing.algorithm or ("first_fit_shuffle" if whole else "split")
    if chosen == "split" and whole and record_format is not None:
        raise ConfigError(
            f"`data.packing.algorithm` split cuts answers from their prompts (format {record_format}); "
            "use first_fit_shuffle."
        )
    return chosen


def known_pack_size(data: DataConfig) -> int | None:
    """Tokens of a row, None where only a packed file can tell."""
    return (data.packing.pack_size if data.packing else None) or data.sequence_length


def data_faults(data: DataConfig) -> Iterator[str]:
    """Faults between the keys of `data` alone."""
    yield from _missing(data)
    yield from _npy(data)
    yield from _sizes(data)
    yield from _formats(data)
    yield from _sources(data)
    yield from _streaming(data)
    yield from _without_effect(data)


# Files that may hold packed rows; only their content tells whether those with the first two suffixes do.
_PACKED_SUFFIXES = (".arrow", ".parquet", ".npy")


def reads_packed(data: DataConfig) -> bool:
    """Whether training certainly reads packed rows."""
    file = data.packing.file if data.packing else None
    return data.format == "packed" or file is not None or any(name.endswith(".npy") for name in _names(data.train))


def tokenises(data: DataConfig) -> bool:
    """Whether something is certainly tokenised."""
    training = not reads_packed(data) and not any(name.endswith(_PACKED_SUFFIXES) for name in _names(data.train))
    names = _names(data.validation)
    validation = bool(names) and data.format != "packed" and not any(n.endswith(_PACKED_SUFFIXES) for n in names)
    return training or validation


def _names(sources: str | tuple[str | Source, ...] | None) -> list[str]:
    """Paths of sources."""
    return [entry if isinstance(entry, str) else entry.path for entry in _entries(sources)]


def _missing(data: DataConfig) -> Iterator[str]:
    if not data.train and (data.packing is None or data.packing.file is None):
        yield "`data.train` is missing. Set it to a file, folder or glob, or to a list of sources."
    if data.sequence_length is None and tokenises(data) and not (reads_packed(data) and data.validation is not None):
        yield "`data.sequence_length` is missing. Set it to the longest document, an integer of at least 2."


def _npy(data: DataConfig) -> Iterator[str]:
    packing = data.packing
    named = [*_names(data.train), *_names(data.validation), *([packing.file] if packing and packing.file else [])]
    npy = next((name for name in named if name.endswith(".npy")), None)
    mask = packing.npy_mask if packing else None
    if npy is not None and mask is None:
        yield (
            f"`data.packing.npy_mask` is missing: {npy} does not say what its loss_mask means. Set it to token (entry "
            "i is about token i: NeMo 2.0.0) or label (about the token after it: later releases)."
        )
    if npy is None and mask is not None:
        yield f"`data.packing.npy_mask` {mask} has no effect without an .npy file. Remove it."
    if npy is not None and known_pack_size(data) is None:
        yield f"`data.packing.pack_size` is missing: {npy} does not say it. Set it to the size it was packed with."


def _sizes(data: DataConfig) -> Iterator[str]:
    packing = data.packing
    if packing is None:
        return
    size, multiple, longest = packing.pack_size, packing.document_multiple, data.sequence_length
    if size is not None and longest is not None and size < longest and not reads_packed(data):
        yield (
            f"`data.sequence_length` {longest} > `data.packing.pack_size` {size}: a document "
            f"must fit in a row. Use `pack_size` {longest} or more, or `sequence_length` {size}."
        )
    row = known_pack_size(data)
    if not reads_packed(data) and row is not None and row % multiple:
        below, above = row - row % multiple, row - row % multiple + multiple
        key = "data.packing.pack_size" if size else "data.sequence_length"
        yield (
            f"`{key}` must be a multiple of `data.packing.document_multiple` {multiple}; got {row}. "
            f"Use {two(below, above)}."
        )


def _formats(data: DataConfig) -> Iterator[str]:
    chat = data.format if data.format in CHAT_FORMATS else None
    if chat and data.packing is not None and data.packing.algorithm == "split":
        yield (
            f"`data.packing.algorithm` split cuts answers from their prompts; got it with `data.format` {chat}. "
            "Use first_fit_shuffle."
        )
    if chat and data.truncation == "split":
        yield (
            f"`data.truncation` split cuts answers from their prompts; got it with `data.format` {chat}. "
            "Use drop, cut_right or drop_oldest_turns."
        )
    if chat and chat != "prompt_completion" and data.truncation == "cut_left":
        yield f"`data.truncation` cut_left is not for chats; got it with `data.format` {chat}. Use drop_oldest_turns."
    if data.format == "text":
        if data.truncation == "drop_oldest_turns":
            yield "`data.truncation` drop_oldest_turns needs chats; got it with `data.format` text. Use split or drop."
        if "train_on" in data.model_fields_set and data.train_on != "all":
            yield f"`data.train_on` {data.train_on} needs chats; `data.format` text trains on all. Remove it."
    if (data.assistant_start is None) != (data.assistant_end is None):
        given, lacking = ("start", "end") if data.assistant_start is not None else ("end", "start")
        yield f"`data.assistant_{given}` is given without `data.assistant_{lacking}`. Give both, or neither."


def _sources(data: DataConfig) -> Iterator[str]:
    """Weights: every source of training has one, or none has."""
    train = [source if isinstance(source, Source) else None for source in _entries(data.train)]
    without = [index for index, source in enumerate(train) if source is None or source.weight is None]
    if without and len(without) < len(train):
        yield (
            f"`data.train[{without[0]}]` has no `weight`, others have. Give every source one (its share of the "
            "documents), or none: then every record is read once."
        )
    if len(train) == 1 and not without:
        yield "`data.train[0].weight` has no effect on the only source. Remove it."
    for index, source in enumerate(_entries(data.validation)):
        if isinstance(source, Source) and source.weight is not None:
            yield f"`data.validation[{index}].weight` has no effect: validation reads every record once. Remove it."


def _entries(sources: str | tuple[str | Source, ...] | None) -> tuple[str | Source, ...]:
    return (sources,) if isinstance(sources, str) else sources or ()


def _streaming(data: DataConfig) -> Iterator[str]:
    if not data.streaming:
        if "shuffle_buffer" in data.model_fields_set:
            yield "`data.shuffle_buffer` has no effect without `data.streaming`: all documents are shuffled. Remove it."
        return
    if reads_packed(data):
        yield "`data.streaming` has no effect on a packed file, which is read at random. Remove it."
    if data.drop_last:
        yield "`data.drop_last` has no effect with `data.streaming`, whose stream has no end. Remove it."
    if data.cache_dir is not None and "cache_dir" in data.model_fields_set and data.validation is None:
        yield "`data.cache_dir` has no effect with `data.streaming`, which keeps nothing. Remove it."
    if data.packing is not None and "window_documents" in data.packing.model_fields_set:
        yield "`data.packing.window_documents` has no effect with `data.streaming`. Set `data.shuffle_buffer` instead."
    if any(isinstance(source, Source) and source.max_records is not None for source in _entries(data.train)):
        yield "`data.train[...].max_records` has no effect with `data.streaming`. Remove one of them."


# Keys that decide how text becomes tokens: a packed file holds tokens, so they can no longer do anything.
_TOKENISING = (
    "fields", "chat_template", "template_kwargs", "assistant_start", "assistant_end", "train_on", "truncation", "bos",
    "eos", "on_bad_record", "max_skipped_fraction",
)  # fmt: skip


def tokenising_faults(data: DataConfig) -> Iterator[str]:
    """Faults of keys that decide how text becomes tokens, where training and validation both are packed rows."""
    for key in _TOKENISING:
        if key in data.model_fields_set:
            yield f"`data.{key}` has no effect: only packed rows are read, which hold tokens. Remove it."


def _without_effect(data: DataConfig) -> Iterator[str]:
    written = data.model_fields_set
    held_out = data.format == "packed" or all(name.endswith(".npy") for name in _names(data.validation))
    if reads_packed(data) and held_out:
        yield from tokenising_faults(data)
    if data.on_bad_record == "error" and "max_skipped_fraction" in written and not reads_packed(data):
        yield "`data.max_skipped_fraction` has no effect with `data.on_bad_record: error`. Remove it, or use skip."
    packing = data.packing
    if packing is not None and not reads_packed(data) and algorithm(data) == "none":
        for key in ("seed", "window_documents"):
            if key in packing.model_fields_set and getattr(packing, key) is not None:
                yield f"`data.packing.{key}` has no effect with algorithm `none`. Remove it."
    seeded = packing is not None and not reads_packed(data) and algorithm(data) not in ("none", "split")
    if not data.shuffle and data.seed is not None and (not seeded or (packing and packing.seed is not None)):
        yield "`data.seed` has no effect with `data.shuffle: false`. Remove it, or shuffle."
    if data.num_workers == 0 and "prefetch_batches" in written:
        yield "`data.prefetch_batches` has no effect with `data.num_workers: 0`. Remove it, or use a worker."


def two(below: int, above: int) -> str:
    """The nearest values to offer."""
    return f"{below} or {above}" if below > 0 else f"{above}"
