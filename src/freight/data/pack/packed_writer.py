"""Writes packed rows, a batch of about a million tokens at a time: Arrow, Parquet, or NeMo's `.npy`.

A file appears under its own name only when it is complete.
"""

from __future__ import annotations

import json
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import freight
from freight.data.documents import NO_TAIL, Documents
from freight.data.pack.npy_file import NpyMask, write_npy
from freight.data.pack.packed_file import CHECKSUM_KEY, COLUMNS, FORMAT, VERSION, checksum
from freight.data.pack.packing import PackedRows
from freight.data.pack.rows import Row
from freight.data.read.packed_mark import METADATA_KEY
from freight.errors import DataError

TOKENS_PER_BATCH = 1 << 20
FORMATS = ("arrow", "parquet", "npy")

Progress = Callable[[int, int, str], None]


def packed_metadata(rows: PackedRows, documents: Documents, seed: int) -> dict[str, Any]:
    """What a packed file says about itself; equal for equal documents and packing.

    Args:
        rows: The plan.
        documents: What it was made for.
        seed: The seed it was made with.
    """
    facts = documents.metadata
    return {
        "format": FORMAT,
        "version": VERSION,
        "pack_size": rows.pack_size,
        "algorithm": rows.algorithm,
        "seed": seed,
        "document_multiple": rows.document_multiple,
        "mask_alignment": "token",
        **{
            key: facts.get(key)
            for key in (
                "sequence_length",
                "truncation",
                "tokenizer_hash",
                "template_hash",
                "vocab_size",
                "pad_id",
                "num_target_tokens",
                "skipped",
            )
        },
        "sources": _sources(documents),
        "num_documents": len(documents),
        "num_rows": len(rows),
        "num_tokens": rows.num_tokens,
        "packing_factor": len(documents) / len(rows),
        "efficiency": rows.efficiency,
        "fill": rows.fill,
        "max_documents_per_row": int(rows.documents_of_rows.max()),
        "max_length": int(rows.lengths.max()),
        "fingerprint": documents.fingerprint,
        "freight": freight.__version__,
    }


def _sources(documents: Documents) -> list[dict[str, Any]]:
    """The sources, each with its number of documents: they stand one source after another."""
    sources = documents.metadata.get("sources") or []
    place = {source.get("name"): number for number, source in enumerate(sources)}
    ends = [
        bisect_right(range(len(documents)), number, key=lambda index: place[documents.source_of(index)])
        for number in range(len(sources))
    ]
    return [{**source, "documents": end - begin} for source, begin, end in zip(sources, [0, *ends], ends, strict=False)]


def write_packed(
    path: Path,
    rows: Iterable[Row],
    metadata: dict[str, Any],
    *,
    npy_mask: NpyMask | None = None,
    progress: Progress | None = None,
) -> None:
    """Write rows to `path`, under a temporary name until complete.

    Args:
        path: Ends in `.arrow`, `.parquet` or `.npy`.
        rows: The rows.
        metadata: From `packed_metadata`; an `.npy` file holds none of it.
        npy_mask: What the `loss_mask` of an `.npy` file shall mean.
        progress: Called with rows written, rows in all, and a word.

    Raises:
        DataError: Another suffix, or rows that an `.npy` file cannot hold.
    """
    if path.suffix.removeprefix(".") not in FORMATS:
        raise DataError(f"{path}: a packed file ends in .arrow, .parquet or .npy; got {path.suffix!r}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        if path.suffix == ".npy":
            assert npy_mask is not None
            whole = _no_split_pieces(path, rows, metadata["algorithm"])
            write_npy(temporary, whole, metadata["num_rows"], npy_mask, metadata["pad_id"], progress)
        else:
            _write_table(temporary, path.suffix == ".parquet", rows, metadata, progress, path.name)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def packed_in_memory(rows: Iterable[Row], metadata: dict[str, Any], progress: Progress | None = None) -> pa.Buffer:
    """The bytes of an Arrow file that nobody writes to disk.

    Args:
        rows: The rows.
        metadata: See `write_packed`.
        progress: See `write_packed`.
    """
    sink = pa.BufferOutputStream()
    _write_table(sink, False, rows, metadata, progress, "rows")
    return sink.getvalue()


def _no_split_pieces(path: Path, rows: Iterable[Row], algorithm: str) -> Iterator[Row]:
    for number, row in enumerate(rows):
        if algorithm == "split" and np.any(row.tail_labels != NO_TAIL):
            raise DataError(
                f"{path}: row {number} ends in a piece of a document that goes on in another row. An .npy file knows "
                "whole sequences only; pack with another algorithm than split."
            )
        yield row


def _write_table(
    sink: Path | pa.NativeFile,
    parquet: bool,
    rows: Iterable[Row],
    metadata: dict[str, Any],
    progress: Progress | None,
    name: str,
) -> None:
    text = json.dumps(metadata, sort_keys=True)
    schema = COLUMNS.with_metadata({METADATA_KEY: text, CHECKSUM_KEY: checksum(text)})
    place = str(sink) if isinstance(sink, Path) else sink
    written = 0
    with pq.ParquetWriter(place, schema, compression="zstd") if parquet else pa.ipc.new_file(place, schema) as writer:
        for batch in _batches(rows):
            writer.write_batch(_record_batch(batch, schema))
            written += len(batch)
            if progress:
                progress(written, metadata["num_rows"], f"write {name}")


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows with about `TOKENS_PER_BATCH` tokens together."""
    batch: list[Row] = []
    tokens = 0
    for row in rows:
        batch.append(row)
        tokens += row.num_tokens
        if tokens >= TOKENS_PER_BATCH:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _record_batch(rows: list[Row], schema: pa.Schema) -> pa.RecordBatch:
    token_offsets = pa.array(np.cumsum([0, *(row.num_tokens for row in rows)], dtype=np.int64))
    span_offsets = pa.array(np.cumsum([0, *(len(row.lengths) for row in rows)], dtype=np.int32))

    def column(name: str) -> pa.Array:
        kind = schema.field(name).type
        values = pa.array(np.concatenate([getattr(row, "ids" if name == "input_ids" else name) for row in rows]))
        maker, offsets = (
            (pa.LargeListArray, token_offsets) if pa.types.is_large_list(kind) else (pa.ListArray, span_offsets)
        )
        return maker.from_arrays(offsets, values.cast(kind.value_type))

    return pa.RecordBatch.from_arrays([column(name) for name in schema.names], schema=schema)
