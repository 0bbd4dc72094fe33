"""`freight pack`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from freight.cli.exits import say
from freight.cli.inputs import Overrides, read_config, tokenizer_path
from freight.errors import ConfigError

if TYPE_CHECKING:
    from freight.config.schema import Config, DataConfig

# In the schema's order: typing caches literals without regard to order, and messages list them.
Algorithm = Literal["first_fit_decreasing", "first_fit_shuffle", "best_fit_decreasing", "none", "split"]
Truncation = Literal["error", "drop", "cut_right", "cut_left", "drop_oldest_turns", "split"]


def pack(
    source: Annotated[
        str | None, typer.Argument(metavar="CONFIG|DATA", help="Config, or data to pack.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder, tokenizer.json or .gguf; needed with DATA.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for packed files, reports and rejects.")] = Path("packed"),
    pack_sizes: Annotated[str | None, typer.Option(help="Tokens of a row, one file each: 2048,4096.")] = None,
    algorithm: Annotated[Algorithm | None, typer.Option(help="By default first_fit_shuffle; split for text.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides order and ties.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Longest document; by default the least size.")] = None,
    document_multiple: Annotated[int | None, typer.Option(help="Each span is padded to a multiple of it.")] = None,
    truncation: Annotated[Truncation | None, typer.Option(help="What happens to longer documents.")] = None,
    file_format: Annotated[Literal["arrow", "parquet"], typer.Option("--format", help="Of the file.")] = "arrow",
    compare: Annotated[bool, typer.Option("--compare", help="Report all algorithms, write nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report, write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files with other metadata.")] = False,
    inspect: Annotated[Path | None, typer.Option(help="Print the metadata of a packed file instead.")] = None,
    row: Annotated[int | None, typer.Option(help="With --inspect: also print this row.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokenise once, pack for every size, and write a file, a report and a picture for each."""
    if inspect is not None:
        _inspect(inspect, row, tokenizer)
        return
    if row is not None:
        raise ConfigError("`--row` has no effect without `--inspect`. Remove it, or name a packed file to inspect.")
    if source is None:
        raise ConfigError("CONFIG or DATA is missing. Write for example `freight pack run.yaml`.")
    sizes = _sizes(pack_sizes)
    given = {
        "algorithm": algorithm,
        "seed": seed,
        "document_multiple": document_multiple,
        "pack_size": sizes[0] if sizes else None,
    }
    packing = {key: value for key, value in given.items() if value is not None}
    if source.endswith((".yaml", ".yml")):
        config = read_config(Path(source), overrides)
        section = _changed(config.data, packing, sizes, sequence_length, truncation)
        tokens, vocabulary = tokenizer or tokenizer_path(config), _vocabulary(config)
    else:
        if overrides:
            raise ConfigError(f"overrides need a config; got {' '.join(overrides)}. Use options instead.")
        section = _of_data(source, packing, sizes, sequence_length, truncation)
        tokens, vocabulary, config = tokenizer or _missing_tokenizer(), None, None
    from freight.data.pack_files import pack_to_files
    from freight.data.tokenizer import load_tokenizer
    from freight.train.console import Progress

    with Progress() as progress:
        reports = pack_to_files(
            section,
            load_tokenizer(tokens),
            output,
            train_seed=config.train.seed if config else 0,
            pack_sizes=sizes,
            file_format=file_format,
            vocab_size=vocabulary,
            compare=compare,
            dry_run=dry_run,
            force=force,
            progress=progress,
        )
    _print(reports, config, as_json)


def _sizes(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ConfigError(f'`--pack-sizes` must be integers with commas; got "{text}". Write 2048,4096.') from None


def _of_data(
    path: str, packing: dict[str, Any], sizes: list[int] | None, length: int | None, truncation: Truncation | None
) -> DataConfig:
    """A data section for a bare file."""
    if sizes is None and length is None:
        raise ConfigError("`--pack-sizes` is missing; a data file names no size. Write --pack-sizes 2048.")
    size = min(sizes or []) if length is None else length
    return _validated({"train": path, "sequence_length": size, "truncation": truncation, "packing": packing})


def _changed(
    section: DataConfig,
    packing: dict[str, Any],
    sizes: list[int] | None,
    length: int | None,
    truncation: Truncation | None,
) -> DataConfig:
    """A config's data section under the options of the command line."""
    raw = section.model_dump(mode="json", exclude_unset=True)
    if packing:
        raw["packing"] = {**(raw.get("packing") or {}), **packing}
    if length is not None:
        raw["sequence_length"] = length
    elif sizes and "sequence_length" not in section.model_fields_set:
        raw["sequence_length"] = min(sizes)
    if truncation is not None:
        raw["truncation"] = truncation
    return _validated(raw)


def _validated(raw: dict[str, Any]) -> DataConfig:
    """A data section, checked as one that stands in a file.

    Raises:
        ConfigError: All its faults.
    """
    from pydantic import ValidationError

    from freight.config.messages import translate
    from freight.config.schema import DataConfig

    try:
        return DataConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(*(sentence for _, sentence in translate(error, raw, DataConfig, "data"))) from None


def _missing_tokenizer() -> str:
    raise ConfigError("`--tokenizer` is missing; data alone names none. Give a folder, tokenizer.json or .gguf file.")


def _vocabulary(config: Config) -> int:
    from freight.assemble.build import architecture_for

    return architecture_for(config).vocab_size


def _print(reports: list[Any], config: Config | None, as_json: bool) -> None:
    from freight.data.batch_size import batch_size_sentence
    from freight.data.pack_report import table

    if as_json:
        say(json.dumps([report.as_dict() for report in reports]))
        return
    for line in (*reports[0].remarks, *table(reports)):
        say(line)
    for report in reports:
        if report.output:
            say()
            say(f"{report.output}:")
            for sentence in report.sentences():
                say(f"  {sentence}")
        if report.advice:
            say(f"  {report.advice}")
        if config is not None and config.train.global_batch_documents is not None:
            say(f"  {batch_size_sentence(config.train.global_batch_documents, report.packing_factor, report.rows)}")


def _inspect(path: Path, row: int | None, tokenizer: str | None) -> None:
    from freight.cli.show import show_row
    from freight.data.packed_file import PackedFile

    file = PackedFile(path)
    for key, value in file.metadata.items():
        say(f"{key:24} {json.dumps(value, ensure_ascii=False)}")
    if row is not None:
        show_row(file, row, tokenizer)
