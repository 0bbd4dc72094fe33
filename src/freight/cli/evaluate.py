"""`freight evaluate`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freight.cli.exits import say
from freight.cli.inputs import ModelPath, Overrides, load_model
from freight.errors import ConfigError

if TYPE_CHECKING:
    from freight.config.schema import DataConfig

# A row as long as the positions of a long-context model would be mostly padding.
LONGEST_DEFAULT_ROW = 8192


def evaluate(
    model: ModelPath,
    overrides: Overrides = None,
    data: Annotated[str | None, typer.Option(help="File to evaluate on; the config's data.validation.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Longest document, in tokens.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Exact mean loss per label token, every document once; the same numbers packed or not."""
    decoder, tokenizer, config = load_model(model, overrides)
    from freight.data.load.build import open_rows
    from freight.data.load.loader import evaluation_batches
    from freight.train.console import Progress
    from freight.train.evaluate import evaluate as measure

    section = _data(config.data if config else None, data, sequence_length, decoder.arch.max_position_embeddings)
    with Progress() as progress:
        rows = open_rows(
            section,
            0,
            "validation",
            tokenizer,
            vocab_size=decoder.arch.vocab_size,
            rejects_dir=None,
            progress=progress,
        ).indexed()
        assert rows is not None, "validation is never streamed"
        result = measure(
            decoder,
            evaluation_batches(rows, rows.pack_size, pad_rows=False),
            source_of=rows.source_of,
            progress=progress,
            total_documents=rows.num_documents,
        )
    if as_json:
        say(json.dumps({key.removeprefix("eval/"): value for key, value in result.metrics().items()}))
        return
    say(f"loss {result.loss:.4f}  perplexity {result.perplexity:.3f}  {result.tokens:,} label tokens")
    if len(result.per_source) > 1:
        for name, part in result.per_source.items():
            say(f"  {name}: loss {part.loss:.4f}  perplexity {part.perplexity:.3f}  {part.tokens:,} label tokens")


def _data(section: DataConfig | None, file: str | None, length: int | None, positions: int) -> DataConfig:
    """The data section to evaluate with: a config's with another file, or the defaults."""
    from freight.config.schema import DataConfig, PackingConfig

    if length is not None and not 2 <= length <= positions:
        raise ConfigError(
            f"`--sequence-length` must lie between 2 and the model's {positions} positions; got {length}."
        )
    if section is None:
        if file is None:
            raise ConfigError("`--data` is missing; a model folder names no data. Give a file to evaluate on.")
        size = length or min(positions, LONGEST_DEFAULT_ROW)
        return DataConfig(train=file, validation=file, sequence_length=size, packing=PackingConfig())
    changes: dict[str, Any] = {} if file is None else {"validation": file, "format": "auto"}
    if length is not None:
        changes["sequence_length"] = length
    return section.model_copy(update=changes)
