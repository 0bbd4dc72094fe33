"""From a configuration to rows: tokenise and pack in memory, or open a packed file and hold it against the config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from freight.config.checks import pack_size
from freight.config.schema import DataConfig, PackingConfig
from freight.data.documents import Documents
from freight.data.file_rows import FileRows
from freight.data.packed_file import SUFFIXES, PackedFile, is_packed, read_metadata
from freight.data.packing import check_pack_size
from freight.data.rows import DocumentRows, RowSource
from freight.data.template import load_chat_template
from freight.data.tokenise import tokenise
from freight.data.tokenizer import tokenizer_hash
from freight.errors import ConfigError, DataError

Which = Literal["train", "validation"]
Progress = Callable[[int, int, str], None]

WITHOUT_TURNS = ("text",)  # formats that may be cut anywhere


def open_rows(
    config: DataConfig,
    train_seed: int,
    which: Which,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    vocab_size: int,
    rejects_dir: Path | None,
    progress: Progress | None = None,
) -> RowSource:
    """The rows of `data.train` or `data.validation`. Validation is never shuffled.

    Args:
        config: The `data` section.
        train_seed: Where `data.seed` is null.
        which: Which of the two.
        tokenizer: The run's tokenizer, with its chat template; None if the config names packed files only.
        vocab_size: The model's; no id may reach it.
        rejects_dir: Where records that cannot be used are listed; those of validation in `validation/` below it.
        progress: Called with done, total and a word.

    Raises:
        ConfigError: Keys that contradict each other or the packed file.
        DataError: Data that cannot be used.
    """
    seed = data_seed(config, train_seed)
    path = packed_path(config, which)
    if path is not None:
        file = PackedFile(path)
        check_against_file(config, file)
        _check_model(config, file, tokenizer, vocab_size)
        return FileRows(file, seed, shuffle=config.shuffle and which == "train")
    check_sizes(config, pack_size(config))
    sources = config.train if which == "train" else config.validation
    if sources is None:
        raise ConfigError("`data.validation` is not set; name a file to evaluate on.")
    if tokenizer is None:
        raise ConfigError("`data.tokenizer` is missing; name a tokenizer folder, a tokenizer.json or a .gguf file.")
    if which == "validation" and rejects_dir is not None:
        rejects_dir = rejects_dir / which  # its sources may have the same names as those of training
    documents = tokenise(sources, config, tokenizer, vocab_size=vocab_size, output_dir=rejects_dir, progress=progress)
    if which == "validation" and config.packing is None:
        # The numbers are the same packed or not; a row per document would only compute padding.
        config = config.model_copy(update={"packing": PackingConfig(algorithm="first_fit_decreasing")})
    return pack_in_memory(documents, config, seed, shuffle=config.shuffle and which == "train")


def pack_in_memory(documents: Documents, config: DataConfig, seed: int, *, shuffle: bool) -> DocumentRows:
    """Rows of tokenised documents as the config wants them.

    Args:
        documents: The documents.
        config: The `data` section.
        seed: Order of documents; also of packing, unless `data.packing.seed` is set.
        shuffle: False keeps the documents' order.
    """
    packing = config.packing
    return DocumentRows(
        documents,
        algorithm_of(config, documents.metadata["format"]),
        pack_size(config),
        seed,
        packing_seed=packing.seed if packing else None,
        shuffle=shuffle,
        document_multiple=packing.document_multiple if packing else 1,
        window_documents=packing.window_documents if packing else None,
    )


def data_seed(config: DataConfig, train_seed: int) -> int:
    """`data.seed`, by default the run's."""
    return train_seed if config.seed is None else config.seed


def algorithm_of(config: DataConfig, record_format: str) -> str:
    """The packing algorithm, by default chosen by the format of the records.

    Raises:
        ConfigError: `split` would cut conversations.
    """
    if config.packing is None:
        return "none"
    whole = record_format not in WITHOUT_TURNS
    algorithm = config.packing.algorithm or ("first_fit_shuffle" if whole else "split")
    if algorithm == "split" and whole:
        raise ConfigError(
            f"`data.packing.algorithm` split cuts answers from their prompts (format {record_format}); "
            "use first_fit_shuffle."
        )
    return algorithm


def check_sizes(config: DataConfig, pack_size: int) -> None:
    """What can be refused before any tokenising.

    Raises:
        ConfigError: Impossible sizes, or `split` with a chat format.
    """
    check_pack_size(pack_size, config.packing.document_multiple if config.packing else 1)
    if config.sequence_length > pack_size:
        raise ConfigError(
            f"`data.sequence_length` {config.sequence_length} > pack_size {pack_size}: a document must fit in a row. "
            f"Set data.sequence_length={pack_size}, or pack_size={config.sequence_length}."
        )
    if config.format != "auto":
        algorithm_of(config, config.format)


def packed_path(config: DataConfig, which: Which) -> Path | None:
    """The packed file that a config names, None if it names data to tokenise.

    Raises:
        DataError: A folder without the right file.
        ConfigError: Format `packed` with several sources.
    """
    if which == "train" and config.packing and config.packing.file:
        return _file_in(Path(config.packing.file).expanduser(), config.packing)
    source = config.train if which == "train" else config.validation
    if isinstance(source, str):
        path = Path(source).expanduser()
        if config.format == "packed":
            return _file_in(path, config.packing)
        return path if config.format == "auto" and is_packed(path) else None
    if source is not None and config.format == "packed":
        raise ConfigError(f"`data.{which}` must be one path with data.format=packed; got {len(source)} sources.")
    return None


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
    if tokenizer is None:
        file.check_model(tokenizer_hash=None, template_hash=None, vocab_size=vocab_size)
        return
    template = load_chat_template(tokenizer, config.chat_template, config.template_kwargs)
    file.check_model(
        tokenizer_hash=tokenizer_hash(tokenizer),
        template_hash=template.hash if template else None,
        vocab_size=vocab_size,
    )


def check_against_file(config: DataConfig, file: PackedFile) -> None:
    """Every key that is spelled out must say what the file says.

    Raises:
        ConfigError: All contradictions together, each with both values.
    """
    facts = file.metadata
    written = config.packing.model_dump(exclude_unset=True, exclude_none=True) if config.packing else {}
    faults = [
        f"`data.packing.{key}` is {written[key]}, but {file.path} was packed with {facts[key]}; leave it out."
        for key in ("pack_size", "algorithm", "seed", "document_multiple")
        if written.get(key, facts[key]) != facts[key]
    ]
    if "window_documents" in written:
        faults.append(f"`data.packing.window_documents` has no effect on the packed file {file.path}; leave it out.")
    lengths = {facts["sequence_length"], facts["pack_size"]}
    if config.sequence_length not in lengths:
        faults.append(
            f"`data.sequence_length` is {config.sequence_length}, but {file.path} was packed with "
            f"{' in rows of '.join(str(n) for n in (facts['sequence_length'], facts['pack_size']))}; "
            f"set it to {facts['sequence_length']}."
        )
    if config.truncation not in (None, facts["truncation"]):
        faults.append(
            f"`data.truncation` is {config.truncation}, but {file.path} was packed with {facts['truncation']}; "
            "leave it out."
        )
    if faults:
        raise ConfigError(*faults)
