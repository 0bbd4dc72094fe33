"""`freight pack`."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from freight.cli.exits import say
from freight.cli.inputs import Overrides, read_config, tokenizer_path
from freight.errors import ConfigError

if TYPE_CHECKING:
    from freight.config.schema import Config, DataConfig
    from freight.data.pack.pack_report import PackReport

# In the schema's order: typing caches literals without regard to order, and messages list them.
Algorithm = Literal["first_fit_decreasing", "first_fit_shuffle", "best_fit_decreasing", "none", "split"]
Truncation = Literal["error", "drop", "cut_right", "cut_left", "drop_oldest_turns", "split"]


def pack(
    context: typer.Context,
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
    file_format: Annotated[Literal["arrow", "parquet", "npy"], typer.Option("--format", help="Of the file.")] = "arrow",
    npy_mask: Annotated[
        Literal["token", "label"] | None,
        typer.Option(help="What entry i of an .npy file's loss_mask is about: token i, or the label after it."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Report all algorithms, write nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report, write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files with other metadata.")] = False,
    convert: Annotated[Path | None, typer.Option(help="Write this packed file as --output, in its format.")] = None,
    inspect: Annotated[Path | None, typer.Option(help="Print the metadata of a packed file instead.")] = None,
    row: Annotated[int | None, typer.Option(help="With --inspect: also print this row.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokenise once, pack for every size, and write a file, a report and a picture for each."""
    _refuse_unread(context, convert, inspect, compare)
    sizes = _sizes(pack_sizes)
    if convert is not None:
        _convert(convert, output, npy_mask, _one_size(sizes), tokenizer, force, as_json)
        return
    if inspect is not None:
        _inspect(inspect, row, npy_mask, _one_size(sizes), tokenizer, as_json)
        return
    if source is None:
        raise ConfigError("CONFIG or DATA is missing. Write for example `freight pack run.yaml`.")
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
    from freight.data.load.pack_files import pack_to_files
    from freight.data.render.tokenizer import load_tokenizer
    from freight.train.console import Progress

    with Progress() as progress:
        reports = pack_to_files(
            section,
            load_tokenizer(tokens),
            output,
            train_seed=config.train.seed if config else 0,
            pack_sizes=sizes,
            file_format=file_format,
            npy_mask=npy_mask,
            vocab_size=vocabulary,
            compare=compare,
            dry_run=dry_run,
            force=force,
            progress=progress,
        )
    if sizes and len(sizes) > 1 and not as_json:
        say(f"documents up to {section.sequence_length:,} tokens for every size; --sequence-length changes it")
    _print(reports, config, compare=compare, as_json=as_json)


# Parameters that each other way of using the command reads; packing reads all but `row`.
_READ = {
    "convert": {"output", "npy_mask", "pack_sizes", "tokenizer", "force", "as_json"},
    "inspect": {"row", "npy_mask", "pack_sizes", "tokenizer", "as_json"},
}


def _refuse_unread(context: typer.Context, convert: Path | None, inspect: Path | None, compare: bool) -> None:
    """Refuse what would have no effect.

    Raises:
        ConfigError: All such options.
    """
    parameters = {parameter.name: parameter for parameter in context.command.params}
    given = {
        name: str(parameter.opts[0]).upper() if parameter.param_type_name == "argument" else parameter.opts[0]
        for name, parameter in parameters.items()
        if name is not None and str(context.get_parameter_source(name)).endswith("COMMANDLINE")
    }
    if convert is not None or inspect is not None:
        way = "convert" if convert is not None else "inspect"
        unread = given.keys() - _READ[way] - {way}
    else:
        way = "compare" if compare else ""
        unread = given.keys() & ({"row", "algorithm", "dry_run"} if compare else {"row"})
    if unread:
        where = f"with `--{way}`" if way else "without `--inspect`"
        raise ConfigError(*(f"`{given[name]}` has no effect {where}. Remove it." for name in sorted(unread)))


def _sizes(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ConfigError(f'`--pack-sizes` must be integers with commas; got "{text}". Write 2048,4096.') from None


def _one_size(sizes: list[int] | None) -> int | None:
    if sizes is not None and len(sizes) != 1:
        raise ConfigError(f"`--pack-sizes` must be one size here; got {', '.join(map(str, sizes))}.")
    return sizes[0] if sizes else None


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


def _print(reports: list[PackReport], config: Config | None, *, compare: bool, as_json: bool) -> None:
    from freight.data.pack.pack_report import table

    if as_json:
        say(json.dumps([report.as_dict() for report in reports]))
        return
    for line in (*reports[0].remarks, *table(reports)):
        say(line)
    for report in reports:
        if not compare:
            say()
            say(f"{report.output or report.pack_size}{' (was there, with equal metadata)' if report.reused else ''}:")
            for sentence in report.sentences():
                say(f"  {sentence}")
            say(f"  {_batch_size(report, config)}")
        if report.advice:
            say(f"{f'{report.pack_size}:' if compare else ' '} {report.advice}")


def _batch_size(report: PackReport, config: Config | None) -> str:
    """A global batch in rows and in documents: the config's, or usual ones."""
    from freight.data.pack.batch_size import batch_size_sentence, examples_sentence, rows_sentence

    if config is None:
        return examples_sentence(report.packing_factor)
    train, facts = config.train, (report.packing_factor, report.rows)
    if train.global_batch_documents is not None:
        return batch_size_sentence(train.global_batch_documents, *facts, drop_last=config.data.drop_last)
    rows = train.global_batch_size or max(1, (train.global_batch_tokens or 0) // report.pack_size)
    return rows_sentence(rows, *facts, drop_last=config.data.drop_last)


def _convert(
    source: Path,
    output: Path,
    npy_mask: str | None,
    pack_size: int | None,
    tokenizer: str | None,
    force: bool,
    as_json: bool,
) -> None:
    from freight.data.pack.convert_packed import convert
    from freight.data.render.tokenizer import load_tokenizer
    from freight.train.console import Progress

    with Progress() as progress:
        metadata = convert(
            source,
            output,
            npy_mask=npy_mask,
            pack_size=pack_size,
            tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
            force=force,
            progress=progress,
        )
    if as_json:
        say(json.dumps({"output": str(output), **metadata}))
        return
    _print_metadata(metadata, every_key=False)
    say(f"{output}: {metadata['num_rows']:,} rows")
    if output.suffix == ".npy":
        say(
            f"{output} holds rows only; to read it, give --npy-mask {npy_mask}, --pack-sizes {metadata['pack_size']} "
            "and the tokenizer"
        )


def _inspect(
    path: Path, row: int | None, npy_mask: str | None, pack_size: int | None, tokenizer: str | None, as_json: bool
) -> None:
    from freight.cli.show import show_spans
    from freight.data.pack.convert_packed import npy_metadata
    from freight.data.pack.npy_file import NpyFile, check_npy_mask
    from freight.data.pack.packed_file import PackedFile
    from freight.data.render.tokenizer import load_tokenizer, pad_id

    if path.suffix == ".npy":
        loaded = None if tokenizer is None else load_tokenizer(tokenizer)
        rows = NpyFile(path, check_npy_mask(npy_mask, "--npy-mask"), None if loaded is None else pad_id(loaded))
        metadata = npy_metadata(rows, pack_size, None, loaded)
    else:
        if npy_mask is not None or pack_size is not None:
            raise ConfigError(f"`--npy-mask` and `--pack-sizes` have no effect: {path} says both. Remove them.")
        rows = PackedFile(path)
        metadata = rows.metadata
    if row is not None and not 0 <= row < len(rows):
        raise ConfigError(f"`--row` must lie between 0 and {len(rows) - 1}; got {row}.")
    if as_json:
        say(json.dumps(metadata))
    else:
        _print_metadata(metadata, every_key=True)
    if row is not None:
        show_spans(rows[row] if isinstance(rows, PackedFile) else next(islice(rows, row, None)), tokenizer)


def _print_metadata(metadata: dict[str, Any], *, every_key: bool) -> None:
    """What a packed file says about itself, and its line of the table."""
    from freight.data.pack.pack_report import table_of_file
    from freight.data.tokens.tokenise import remarks

    if every_key:
        for key, value in metadata.items():
            say(f"{key:24} {json.dumps(value, ensure_ascii=False)}")
    notices, warnings = remarks(metadata)
    for line in (*notices, *(f"warning: {warning}" for warning in warnings), *table_of_file(metadata)):
        say(line)
