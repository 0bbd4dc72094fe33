"""`freight show`: what the model will see, and which of it the loss sees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freight.cli.exits import say
from freight.cli.inputs import Overrides, read_config, tokenizer_path
from freight.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from freight.config.schema import DataConfig
    from freight.data.documents import Document
    from freight.data.packed_file import PackedFile
    from freight.data.rows import Row

# Without a bound, one record of a long file would be cut or refused; showing needs no limit.
ANY_LENGTH = 2**30


def show(
    source: Annotated[
        str, typer.Argument(metavar="DATA|CONFIG", help="Data, a packed file, or a config.", show_default=False)
    ],
    overrides: Overrides = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder, tokenizer.json or .gguf; needed with DATA.")] = None,
    record: Annotated[int, typer.Option(help="Which record, or row of a packed file, from 0.")] = 0,
    ids: Annotated[bool, typer.Option("--ids", help="Print each token with its id.")] = False,
) -> None:
    """Print a record as tokens: supervised text in green between ⟦ and ⟧, the rest dim."""
    if record < 0:
        raise ConfigError(f"`--record` must be at least 0; got {record}.")
    if source.endswith((".yaml", ".yml")):
        config = read_config(Path(source), overrides)
        _show_record(config.data, tokenizer or tokenizer_path(config), record, ids)
        return
    if overrides:
        raise ConfigError(f"overrides need a config; got {' '.join(overrides)}. Use options instead.")
    from freight.data.packed_file import PackedFile, is_packed

    if Path(source).is_file() and is_packed(Path(source)):
        show_row(PackedFile(source), record, tokenizer, ids=ids)
        return
    from freight.config.schema import DataConfig

    if tokenizer is None:
        raise ConfigError("`--tokenizer` is missing; data alone names none. Give a folder, tokenizer.json or .gguf.")
    _show_record(DataConfig(train=source, sequence_length=ANY_LENGTH), tokenizer, record, ids)


def show_row(file: PackedFile, number: int, tokenizer: str | None, *, ids: bool = False) -> None:
    """Print one row of a packed file; ids only, where there is no tokenizer.

    Raises:
        DataError: There is no such row.
    """
    if not 0 <= number < len(file):
        raise DataError(f"{file.path}: row {number} does not exist; rows are 0 to {len(file) - 1}.")
    show_spans(file[number], tokenizer, ids=ids)


def show_spans(row: Row, tokenizer: str | None, *, ids: bool = False) -> None:
    """Print the documents of a row; ids only, where there is no tokenizer."""
    from freight.data.documents import make_document
    from freight.data.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
    start = 0
    for document, length, tail in zip(row.documents, row.lengths, row.tail_labels, strict=True):
        stop = start + int(length)
        say(f"document {document}: {length} tokens")
        _print(make_document(row.ids[start:stop], row.loss_mask[start:stop], int(tail)), loaded, ids=ids)
        start = stop


def _show_record(data: DataConfig, tokenizer: str, record: int, ids: bool) -> None:
    from freight.config.schema import Source
    from freight.data.tokenise import tokenise
    from freight.data.tokenizer import load_tokenizer

    # Only the records up to the one wanted are read, and nothing is written.
    if data.train is None:
        raise ConfigError("`data.train` is missing. Show the packed file itself: `freight show FILE`.")
    sources = (data.train,) if isinstance(data.train, str) else data.train
    limited = tuple(
        source.model_copy(update={"max_records": record + 1})
        if isinstance(source, Source)
        else Source(path=source, max_records=record + 1)
        for source in sources
    )
    loaded = load_tokenizer(tokenizer)
    section = data.model_copy(update={"cache_dir": None})
    documents = tokenise(limited, section, loaded, vocab_size=2**31, output_dir=None)
    if record >= len(documents):
        raise DataError(f"{data.train}: record {record} does not exist; there are {len(documents)}.")
    document = documents[record]
    say(f"{documents.origin(record)}: {len(document)} tokens, {document.num_targets} supervised")
    _print(document, loaded, ids=ids)


def _print(document: Document, tokenizer: PreTrainedTokenizerBase | None, *, ids: bool) -> None:
    from rich.console import Console

    from freight.data.show import show_document

    Console(soft_wrap=True, highlight=False).print(show_document(document, tokenizer, ids=ids))
