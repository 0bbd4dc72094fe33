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

    from freight.config.schema import DataConfig, Source
    from freight.data.documents import Document
    from freight.data.pack.packed_file import PackedFile
    from freight.data.pack.rows import Row

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
    from freight.data.pack.packed_file import PackedFile
    from freight.data.read.packed_mark import is_packed

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
    from freight.data.render.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
    start = 0
    for document, length, tail in zip(row.documents, row.lengths, row.tail_labels, strict=True):
        stop = start + int(length)
        say(f"document {document}: {length} tokens")
        _print(make_document(row.ids[start:stop], row.loss_mask[start:stop], int(tail)), loaded, ids=ids)
        start = stop


def _show_record(data: DataConfig, tokenizer: str, record: int, ids: bool) -> None:
    from freight.config.schema import Source
    from freight.data.render.tokenizer import load_tokenizer

    if data.train is None:
        raise ConfigError("`data.train` is missing. Show the packed file itself: `freight show FILE`.")
    loaded = load_tokenizer(tokenizer)
    left = record
    for entry in (data.train,) if isinstance(data.train, str) else data.train:
        source = entry if isinstance(entry, Source) else Source(path=entry)
        documents, read, reject = _documents_of(source, left, data, loaded)
        if read <= left:
            left -= read
            continue
        for document, origin in documents:
            say(f"{origin}: {len(document)} tokens, {document.num_targets} supervised")
            _print(document, loaded, ids=ids)
        if not documents:
            field = f"{reject['field']}: " if reject["field"] else ""
            raise DataError(f"{reject['file']}:{reject['line']}: {field}{reject['message']}")
        return
    raise DataError(f"record {record} does not exist; there are {record - left}.")


def _documents_of(
    source: Source, number: int, data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[tuple[Document, str]], int, dict[str, str]]:
    """What one record of a source becomes, with where it stands; the records read; and the last one that was refused.

    Documents of the records up to this one that are none of those up to the one before: a record may become several,
    or none. Nothing is written.
    """
    import json
    from tempfile import TemporaryDirectory

    from freight.data.tokens.tokenise import tokenise

    allowed = source.max_records or number + 1
    section = data.model_copy(
        update={"cache_dir": None, "on_bad_record": "skip", "max_skipped_fraction": 1.0, "packing": None}
    )
    before, documents, reject = 0, None, {}
    for records in sorted({min(allowed, count) for count in (number, number + 1)} - {0}):
        limited = source.model_copy(update={"max_records": records})
        with TemporaryDirectory() as folder:
            before = 0 if documents is None else len(documents)
            try:
                documents = tokenise((limited,), section, tokenizer, vocab_size=2**31, output_dir=Path(folder))
            except DataError:
                documents = None
            for path in Path(folder).glob("rejects-*.jsonl"):
                reject = json.loads(path.read_bytes().splitlines()[-1])
            if documents is None and not reject:
                tokenise((limited,), section, tokenizer, vocab_size=2**31)
    if documents is None:
        return [], number + 1, reject
    new = range(before if documents.metadata["records_read"] > number else len(documents), len(documents))
    return [(documents[index], documents.origin(index)) for index in new], documents.metadata["records_read"], reject


def _print(document: Document, tokenizer: PreTrainedTokenizerBase | None, *, ids: bool) -> None:
    from rich.console import Console

    from freight.data.load.show import show_document

    Console(soft_wrap=True, highlight=False).print(show_document(document, tokenizer, ids=ids))
