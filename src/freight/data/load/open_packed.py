"""Packed files named by a configuration: found, opened, and held against what the configuration says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from freight.config.data_checks import known_pack_size, tokenising_faults
from freight.config.schema import DataConfig, PackingConfig, Source
from freight.data.pack.convert_packed import IMPORTED, open_npy
from freight.data.pack.npy_file import SUFFIX as NPY
from freight.data.pack.npy_file import check_npy_mask
from freight.data.pack.packed_file import PackedFile, read_metadata
from freight.data.pack.packed_writer import Progress
from freight.data.read.packed_mark import SUFFIXES, is_packed
from freight.data.read.sources import resolve_sources
from freight.data.render.template import load_chat_template
from freight.data.render.tokenizer import tokenizer_hash
from freight.data.tokens.cache_key import combined_hash, hash_files
from freight.errors import ConfigError, DataError

Which = Literal["train", "validation"]


def open_packed(
    config: DataConfig,
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    progress: Progress | None = None,
) -> PackedFile:
    """Open a packed file for a model.

    Args:
        config: The `data` section; it may say what the file says, and nothing else.
        path: From `packed_path`.
        tokenizer: The run's, with its chat template; None = not compared.
        vocab_size: The model's.
        progress: For an `.npy` file, which is converted.

    Raises:
        ConfigError: Keys that contradict the file.
        DataError: A file for another tokenizer, template or model, or one whose source has changed.
    """
    if path.suffix == NPY:
        mask = check_npy_mask(config.packing.npy_mask if config.packing else None, "data.packing.npy_mask")
        file = open_npy(path, mask, known_pack_size(config), tokenizer, config.cache_dir, progress)
    else:
        file = PackedFile(path)
    faults = [*_contradictions(config, file)]
    if faults:
        raise ConfigError(*faults)
    _check_model(config, file, tokenizer, vocab_size)
    if config.packing and config.packing.file and config.train:
        _check_sources(config, file)
    return file


def packed_path(config: DataConfig, which: Which) -> Path | None:
    """The packed file that a config names, None if it names data to tokenise.

    Raises:
        DataError: A folder without the right file.
        ConfigError: Several sources, one of them packed.
    """
    if which == "train" and config.packing and config.packing.file:
        return _file_in(Path(config.packing.file).expanduser(), config.packing)
    sources = config.train if which == "train" else config.validation
    if sources is None:
        return None
    entries = sources if isinstance(sources, tuple) else (sources,)
    paths = [Path(entry.path if isinstance(entry, Source) else entry).expanduser() for entry in entries]
    packed = [path for path in paths if config.format == "packed" or _holds_rows(path, config)]
    if not packed:
        return None
    if len(paths) > 1:
        raise ConfigError(
            f"`data.{which}` must be one path where it names packed rows ({packed[0]}); got {len(paths)} sources. "
            "Pack them into one file."
        )
    return _file_in(packed[0], config.packing)


def _holds_rows(path: Path, config: DataConfig) -> bool:
    return path.suffix == NPY or (config.format == "auto" and is_packed(path))


def check_tokenising(config: DataConfig) -> None:
    """Refuse keys that decide how text becomes tokens, where there is no text: only the files can tell.

    Raises:
        ConfigError: All of them.
    """
    if packed_path(config, "train") is None:
        return
    if config.validation is None or packed_path(config, "validation") is not None:
        faults = list(tokenising_faults(config))
        if faults:
            raise ConfigError(*faults)


def for_validation(config: DataConfig) -> DataConfig:
    """The section as the validation data need it: packed as well as can be, in rows that training has too.

    The numbers are the same packed or not; a row per document would only compute padding.
    """
    path = packed_path(config, "train")
    packing = config.packing
    if path is None and packing is not None:
        return config
    size, length = known_pack_size(config), config.sequence_length
    if path is not None and path.suffix != NPY:
        facts = read_metadata(path)
        size, length = facts["pack_size"], length or facts["sequence_length"]
    tight = PackingConfig(algorithm="first_fit_decreasing", pack_size=size)
    return config.model_copy(update={"packing": tight, "sequence_length": length or size})


def _file_in(path: Path, packing: PackingConfig | None) -> Path:
    """The file itself, or the one in a folder that has the config's pack size."""
    if not path.is_dir():
        return path
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and is_packed(file))
    wanted = packing.pack_size if packing else None
    fitting = [file for file in files if wanted is None or read_metadata(file)["pack_size"] == wanted]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(file.name for file in files) or "none"
    size = f" with pack_size {wanted}" if wanted else ""
    raise DataError(f"{path}: {len(fitting)} packed files{size} in this folder ({names}); name one file.")


def _check_model(
    config: DataConfig, file: PackedFile, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> None:
    template = load_chat_template(tokenizer, config.chat_template, config.template_kwargs) if tokenizer else None
    file.check_model(
        tokenizer_hash=tokenizer_hash(tokenizer) if tokenizer else None,
        template_hash=template.hash if template else None,
        vocab_size=vocab_size,
    )


def _check_sources(config: DataConfig, file: PackedFile) -> None:
    """`data.train` beside a packed file says what the file was packed from: that it has not changed is checked.

    Raises:
        ConfigError: Rows that somebody else packed, which know no source.
        DataError: Other content.
    """
    assert config.train is not None
    if file.metadata["algorithm"] == IMPORTED:
        raise ConfigError(f"`data.train` has no effect: the rows come from {file.path}. Remove it.")
    sources = resolve_sources(config.train, config)
    hashes = hash_files(sources)
    now = {source.path: combined_hash([hashes[path] for path in source.files]) for source in sources}
    then = [facts["hash"] for facts in file.metadata["sources"]]
    if sorted(now.values()) != sorted(then):
        changed = next((path for path, found in now.items() if found not in then), next(iter(now)))
        raise DataError(
            f"{file.path}: was not packed from {changed} as it is now (hash {now[changed][:8]}). Pack again, or leave "
            "out data.train."
        )


def _contradictions(config: DataConfig, file: PackedFile) -> Iterator[str]:
    """Every key that is spelled out must say what the file says."""
    facts = file.metadata
    written: dict[str, Any] = config.packing.model_dump(exclude_unset=True, exclude_none=True) if config.packing else {}
    for key in ("pack_size", "algorithm", "seed", "document_multiple"):
        if written.get(key, facts[key]) != facts[key]:
            said = f"was packed with {facts[key]}" if facts[key] not in (None, IMPORTED) else "does not say its own"
            yield f"`data.packing.{key}` is {written[key]}, but {file.path} {said}; leave it out."
    if "window_documents" in written:
        yield f"`data.packing.window_documents` has no effect on the packed file {file.path}; leave it out."
    if config.sequence_length not in (None, facts["sequence_length"], facts["pack_size"]):
        yield (
            f"`data.sequence_length` is {config.sequence_length}, but {file.path} was packed with "
            f"{facts['sequence_length']} in rows of {facts['pack_size']}; set it to {facts['sequence_length']}."
        )
