"""`freight pack`: tokenise once, pack for every size, and write a file, a report and a picture for each.

Nothing is written before everything that can be refused has been. A file that is there with equal metadata is reused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from freight.config.data_checks import WITHOUT_TURNS, algorithm, longest_document, pack_size
from freight.config.schema import DataConfig, PackingConfig, Source
from freight.data.documents import Documents
from freight.data.load.build import check_sizes, data_seed
from freight.data.pack.npy_file import check_npy_mask
from freight.data.pack.pack_picture import draw
from freight.data.pack.pack_report import PackReport, advise, measure
from freight.data.pack.packed_file import read_metadata
from freight.data.pack.packed_writer import FORMATS, packed_metadata, write_packed
from freight.data.pack.packing import ALGORITHMS, PackedRows, pack
from freight.data.pack.rows import rows_of
from freight.data.tokens.tokenise import remarks, tokenise
from freight.errors import ConfigError, DataError

Progress = Callable[[int, int, str], None]


def pack_to_files(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    *,
    train_seed: int = 0,
    pack_sizes: Sequence[int] | None = None,
    file_format: str = "arrow",
    npy_mask: str | None = None,
    vocab_size: int | None = None,
    compare: bool = False,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> list[PackReport]:
    """Pack `data.train` for several sizes.

    Args:
        config: The `data` section; its `packing` holds algorithm, seed and multiple, and defaults where it is null.
        tokenizer: With its chat template.
        output: Folder for `packed_{pack_size}_seed{seed}.arrow`, `.json` and `.png`, and for rejects.
        train_seed: Where neither `data.packing.seed` nor `data.seed` is set.
        pack_sizes: Tokens of a row, one file each; None = the config's.
        file_format: `arrow`, `parquet` or `npy`.
        npy_mask: What the `loss_mask` of an `.npy` file shall mean, `token` or `label`.
        vocab_size: The model's; None = the tokenizer's.
        compare: Report all algorithms, and write nothing.
        dry_run: Report, and write nothing.
        force: Overwrite files with other metadata.
        progress: Called with done, total and a word.

    Returns:
        A report per file, or per size and algorithm with `compare`.

    Raises:
        ConfigError: Sizes, algorithm or format that cannot be, or a file that would be overwritten.
        DataError: Data that cannot be used.
    """
    if config.packing is None:
        config = config.model_copy(update={"packing": PackingConfig()})
    sizes = [pack_size(config)] if pack_sizes is None else list(pack_sizes)
    check_request(config, sizes, file_format, npy_mask)
    if config.train is None:
        raise ConfigError("`data.train` is missing. Name a file, a folder or a glob to pack.")
    mask = check_npy_mask(npy_mask, "--npy-mask") if file_format == "npy" else None
    documents = tokenise(
        config.train,
        config,
        tokenizer,
        vocab_size=len(tokenizer) if vocab_size is None else vocab_size,
        output_dir=None if compare or dry_run else output,
        progress=progress,
    )
    if not len(documents):
        counts = ", ".join(f"{reason} {count:,}" for reason, count in documents.metadata["skipped"].items())
        raise DataError(f"0 documents to pack{f' (left out: {counts})' if counts else ''}.")
    seed = data_seed(config, train_seed)
    if config.packing and config.packing.seed is not None:
        seed = config.packing.seed
    if compare:
        return _compare(documents, config, sizes, seed, progress)
    chosen = algorithm(config, documents.metadata["format"])
    packed = [_pack(documents, config, chosen, size, seed) for size in sizes]
    reports = [_report(documents, config, rows, seed, seconds) for rows, seconds in packed]
    if dry_run:
        return reports
    if file_format == "npy":
        _check_whole([rows for rows, _ in packed], len(documents))
    paths = [output / f"packed_{size}_seed{seed}.{file_format}" for size in sizes]
    metadata = [packed_metadata(rows, documents, seed) for rows, _ in packed]
    reused = [_reusable(path, facts, force=force) for path, facts in zip(paths, metadata, strict=True)]
    for path, facts, (rows, _), report, there in zip(paths, metadata, packed, reports, reused, strict=True):
        if not there:
            write_packed(path, rows_of(rows, documents), facts, npy_mask=mask, progress=progress)
        _write_beside(path, rows, documents.lengths, replace(report, output=str(path)))
    return [
        replace(report, output=str(path), reused=there)
        for path, report, there in zip(paths, reports, reused, strict=True)
    ]


def check_request(config: DataConfig, sizes: Sequence[int], file_format: str, npy_mask: str | None) -> None:
    """What can be refused before any tokenising.

    Raises:
        ConfigError: All faults together.
    """
    faults = []
    if file_format not in FORMATS:
        faults.append(f"`--format` must be {', '.join(FORMATS)}; got {file_format!r}.")
    try:
        if file_format == "npy":
            check_npy_mask(npy_mask, "--npy-mask")
        elif npy_mask is not None:
            faults.append(f"`--npy-mask` has no effect with `--format {file_format}`. Remove it.")
    except ConfigError as error:
        faults.extend(error.faults)
    if config.streaming:
        faults.append("`data.streaming` has no effect on a packed file, for which everything is read. Remove it.")
    if any(isinstance(source, Source) and source.weight is not None for source in config.train or ()):
        faults.append("`weight` has no effect in a packed file, which holds every document once. Remove the weights.")
    repeated = sorted({size for size in sizes if list(sizes).count(size) > 1})
    if repeated:
        faults.append(f"`--pack-sizes` names {', '.join(map(str, repeated))} more than once; name each size once.")
    if config.packing and config.packing.file:
        faults.append("`data.packing.file` names a packed file already; leave it out to pack `data.train`.")
    for size in dict.fromkeys(sizes):
        try:
            check_sizes(config, size)
        except ConfigError as error:
            faults.extend(error.faults)
    if faults:
        raise ConfigError(*dict.fromkeys(faults))


def _check_whole(packed: Sequence[PackedRows], num_documents: int) -> None:
    """Refuse what `write_packed` would refuse later.

    Raises:
        ConfigError: Documents in pieces.
    """
    for rows in packed:
        if len(rows.documents) > num_documents:
            raise ConfigError(
                f"`--format` npy holds whole documents only, and split cuts {len(rows.documents) - num_documents:,} "
                f"times at pack_size {rows.pack_size}. Use --algorithm first_fit_shuffle, or --format arrow."
            )


def _pack(
    documents: Documents, config: DataConfig, algorithm: str, pack_size: int, seed: int
) -> tuple[PackedRows, float]:
    """The plan, and the seconds it took."""
    started = time.perf_counter()
    rows = pack(
        documents.lengths,
        algorithm,
        pack_size,
        seed,
        document_multiple=_multiple(config),
        shuffle=config.shuffle,
    )
    return rows, time.perf_counter() - started


def _report(
    documents: Documents, config: DataConfig, rows: PackedRows, seed: int, seconds: float, *, advice: bool = True
) -> PackReport:
    notices, warnings = remarks(documents.metadata)
    report = measure(
        rows,
        documents.lengths,
        sequence_length=longest_document(config),
        seed=seed,
        seconds=seconds,
        skipped=dict(documents.metadata["skipped"]),
        tokens_cut=documents.metadata.get("tokens_cut", 0),
        tokens_dropped=documents.metadata.get("tokens_dropped", 0),
        advice=advise(documents.lengths, rows.pack_size, seed, document_multiple=_multiple(config)) if advice else "",
    )
    return replace(report, remarks=[*notices, *(f"warning: {warning}" for warning in warnings)])


def _compare(
    documents: Documents, config: DataConfig, sizes: Sequence[int], seed: int, progress: Progress | None
) -> list[PackReport]:
    """All algorithms that the records allow, for every size; the first line of a size carries the advice."""
    allowed = [a for a in ALGORITHMS if a != "split" or documents.metadata["format"] in WITHOUT_TURNS]
    reports = []
    for size in sizes:
        for name in allowed:
            if progress:
                progress(len(reports), len(sizes) * len(allowed), f"{name} in rows of {size:,}")
            rows, seconds = _pack(documents, config, name, size, seed)
            reports.append(_report(documents, config, rows, seed, seconds, advice=name == allowed[0]))
    return reports


def _multiple(config: DataConfig) -> int:
    return config.packing.document_multiple if config.packing else 1


def _reusable(path: Path, metadata: dict, *, force: bool) -> bool:
    """Whether the file is there and says the same.

    Raises:
        ConfigError: It says something else, and may not be overwritten.
    """
    if not path.exists():
        return False
    if path.suffix == ".npy":
        if force:
            return False
        raise ConfigError(f"{path} exists, and an .npy file does not say how it was packed. Use --force.")
    try:
        there = read_metadata(path)
    except DataError as error:
        if force:
            return False
        raise ConfigError(f"{path} exists and cannot be reused: {error} Use --force to overwrite it.") from error
    differ = [key for key in metadata if key != "freight" and json.loads(json.dumps(metadata[key])) != there.get(key)]
    if differ and not force:
        shown = ", ".join(f"{key} {there.get(key)} -> {metadata[key]}" for key in differ[:3])
        raise ConfigError(f"{path} exists and was packed otherwise ({shown}). Use --force to overwrite it.")
    return not differ


def _write_beside(path: Path, rows: PackedRows, lengths: np.ndarray, report: PackReport) -> None:
    """The report and the picture of a packed file."""
    path.with_suffix(".json").write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    draw(path.with_suffix(".png"), report, rows, lengths)
