import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import freight.data.pack.packed_file as packed_file
import freight.data.pack.packed_writer as packed_writer
from freight.data.documents import InMemoryDocuments, make_document
from freight.data.pack.document_rows import DocumentRows
from freight.data.pack.file_rows import FileRows
from freight.data.pack.packed_file import PackedFile, read_metadata
from freight.data.pack.packed_writer import packed_metadata, write_packed
from freight.data.pack.packing import pack
from freight.data.pack.rows import rows_of
from freight.data.read.packed_mark import is_packed
from freight.errors import DataError

METADATA = {"tokenizer_hash": "aaaa", "template_hash": "bbbb", "vocab_size": 50, "pad_id": 3}


def documents(lengths, seed=0, metadata=METADATA):
    random = np.random.default_rng(seed)
    return InMemoryDocuments(
        [
            make_document(random.integers(0, 50, n), random.integers(0, 2, n) == 1, int(random.integers(-1, 3)))
            for n in lengths
        ],
        metadata,
    )


def written(path, made, algorithm="first_fit_shuffle", pack_size=16, seed=0, multiple=1):
    rows = pack(made.lengths, algorithm, pack_size, seed, document_multiple=multiple)
    write_packed(path, rows_of(rows, made), packed_metadata(rows, made, seed))
    return rows


def forged(path, changes=None, checksum=None, schema=packed_file.COLUMNS, rows=0):
    """A file with any metadata, its checksum right unless given."""
    text = json.dumps({"format": "freight-packed", "version": 1, "num_rows": rows, **(changes or {})})
    metadata = {packed_file.METADATA_KEY: text, packed_file.CHECKSUM_KEY: checksum or packed_file.checksum(text)}
    with pa.ipc.new_file(str(path), schema.with_metadata(metadata)):
        pass
    return path


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    algorithm=st.sampled_from(["first_fit_shuffle", "best_fit_decreasing", "split", "none"]),
    suffix=st.sampled_from([".arrow", ".parquet"]),
    multiple=st.sampled_from([1, 4]),
    batch=st.sampled_from([1, 100, 1 << 20]),
)
def test_what_is_written_is_read(tmp_path, lengths, algorithm, suffix, multiple, batch):
    made = documents(lengths)
    pack_size = 16 if algorithm == "split" else 40
    path = tmp_path / f"packed{suffix}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_writer, "TOKENS_PER_BATCH", batch)
        rows = written(path, made, algorithm, pack_size, multiple=multiple)
    file = PackedFile(path)
    assert len(file) == len(rows)
    for number in range(len(rows)):
        row = file[number]
        spans = rows.row(number)
        pieces = [made[d].piece(start, start + length) for d, start, length in spans]
        assert row.documents.tolist() == [d for d, _, _ in spans]
        assert row.lengths.tolist() == [length for _, _, length in spans]
        assert row.ids.tolist() == [i for piece in pieces for i in piece.ids.tolist()]
        assert row.loss_mask.tolist() == [m for piece in pieces for m in piece.loss_mask.tolist()]
        assert row.tail_labels.tolist() == [piece.tail_label for piece in pieces]
    spans, tokens = file.shape()
    assert spans.tolist() == rows.lengths.tolist()
    assert tokens.tolist() == rows.tokens_of_rows.tolist()
    assert sum(file[n].num_targets for n in range(len(file))) == file.metadata["num_target_tokens"]


def test_rows_from_a_file_equal_rows_from_memory(tmp_path):
    made = documents([3, 9, 16, 1, 5, 5, 7])
    written(tmp_path / "p.arrow", made, "split", pack_size=8)
    from_file = FileRows(PackedFile(tmp_path / "p.arrow"), shuffle=False)
    in_memory = DocumentRows(made, "split", 8, shuffle=False)
    assert from_file.num_tokens == in_memory.num_tokens == 46
    seen = [
        sorted(
            (int(d), int(length), int(tail))
            for n in range(source.rows_in(0, 0))
            for row in [source.row(0, 0, n)]
            for d, length, tail in zip(row.documents, row.lengths, row.tail_labels, strict=True)
        )
        for source in (from_file, in_memory)
    ]
    assert sum(length for _, length, _ in seen[0]) == sum(length for _, length, _ in seen[1])
    assert from_file.packing_factor == 7 / 6


def test_metadata_tell_what_was_done(tmp_path):
    made = documents([10, 6, 16])
    written(tmp_path / "p.arrow", made, "first_fit_decreasing", seed=4)
    facts = read_metadata(tmp_path / "p.arrow")
    expected = {
        "format": "freight-packed",
        "version": 1,
        "pack_size": 16,
        "algorithm": "first_fit_decreasing",
        "seed": 4,
        "document_multiple": 1,
        "mask_alignment": "token",
        "num_documents": 3,
        "num_rows": 2,
        "num_tokens": 32,
        "packing_factor": 1.5,
        "efficiency": 1.0,
        "fill": 1.0,
        "max_documents_per_row": 2,
        "max_length": 16,
        "pad_id": 3,
        "vocab_size": 50,
    }
    assert {key: facts[key] for key in expected} == expected


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_metadata_is_an_error(tmp_path, suffix, place, bit):
    path = tmp_path / f"packed{suffix}"
    if not path.exists():
        written(path, documents([10, 6, 16]))
    whole = path.read_bytes()
    text = json.dumps(read_metadata(path), sort_keys=True).encode()
    start = whole.rindex(text)  # the copy in the footer is the one that counts
    damaged = bytearray(whole)
    damaged[start + min(int(place * len(text)), len(text) - 1)] ^= 1 << bit
    broken = tmp_path / f"broken{suffix}"
    broken.write_bytes(damaged)
    with pytest.raises(DataError, match="broken"):
        PackedFile(broken)


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_a_flipped_bit_anywhere_is_an_error_that_names_the_file_or_another_value(tmp_path, suffix):
    written(tmp_path / f"packed{suffix}", documents([10, 6, 16] * 3))
    whole = (tmp_path / f"packed{suffix}").read_bytes()
    broken = tmp_path / f"broken{suffix}"
    refused = 0
    for place in range(0, 8 * len(whole), 251):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        broken.write_bytes(damaged)
        try:
            file = PackedFile(broken)
            shape = [(len(row.ids), len(row.loss_mask)) for row in file]
        except DataError as error:
            assert str(broken) in str(error)
            refused += 1
        else:
            assert sum(tokens for tokens, _ in shape) == file.metadata["num_tokens"]
    assert refused > 10


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_a_cut_file_is_an_error(tmp_path, suffix):
    path = tmp_path / f"packed{suffix}"
    written(path, documents([10, 6, 16]))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=f"cannot be read as {suffix[1:]}"):
        PackedFile(path)


def test_what_is_no_packed_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such packed file"):
        PackedFile(tmp_path / "missing.arrow")
    plain = tmp_path / "plain.arrow"
    with pa.ipc.new_file(str(plain), pa.schema([("a", pa.int32())])):
        pass
    with pytest.raises(DataError, match="is no packed file"):
        PackedFile(plain)
    assert not is_packed(plain)
    assert not is_packed(tmp_path / "missing.arrow")
    with pytest.raises(DataError, match="version 2; this program reads freight-packed version 1"):
        PackedFile(forged(tmp_path / "newer.arrow", {"version": 2}))
    with pytest.raises(DataError, match="checksum differs"):
        PackedFile(forged(tmp_path / "damaged.arrow", checksum="00"))
    with pytest.raises(DataError, match="columns are a; expected input_ids"):
        PackedFile(forged(tmp_path / "columns.arrow", schema=pa.schema([("a", pa.int32())])))
    with pytest.raises(DataError, match="holds 0 rows, its metadata say 7"):
        PackedFile(forged(tmp_path / "rows.arrow", rows=7))


def test_a_row_whose_lengths_lie_is_named(tmp_path):
    path = tmp_path / "lies.arrow"
    text = json.dumps({"format": "freight-packed", "version": 1, "num_rows": 1})
    schema = packed_file.COLUMNS.with_metadata(
        {packed_file.METADATA_KEY: text, packed_file.CHECKSUM_KEY: packed_file.checksum(text)}
    )
    columns = [[[1, 2, 3]], [[False, True, True]], [[2]], [[-1]], [[0]]]
    with pa.ipc.new_file(str(path), schema) as writer:
        writer.write_batch(
            pa.RecordBatch.from_arrays(
                [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
            )
        )
    with pytest.raises(DataError, match="row 0 is damaged"):
        PackedFile(path)[0]


def test_a_file_for_another_model_is_refused_with_both_values(tmp_path):
    written(tmp_path / "p.arrow", documents([10, 6, 16]))
    file = PackedFile(tmp_path / "p.arrow")
    fitting = {"tokenizer_hash": "aaaa", "template_hash": "bbbb", "vocab_size": 50}
    file.check_model(**fitting)
    file.check_model(tokenizer_hash=None, template_hash=None, vocab_size=None)
    with pytest.raises(DataError, match=r"another tokenizer \(aaaa; the config's is cccc\)"):
        file.check_model(**{**fitting, "tokenizer_hash": "cccc"})
    with pytest.raises(DataError, match=r"another chat template \(bbbb; the config's is cccc\)"):
        file.check_model(**{**fitting, "template_hash": "cccc"})
    with pytest.raises(DataError, match="vocabulary of 50, the model 49"):
        file.check_model(**{**fitting, "vocab_size": 49})


def test_a_failed_write_leaves_nothing(tmp_path):
    class Failing(InMemoryDocuments):
        def __getitem__(self, index, /):
            raise DataError("disk on fire")

    made = Failing([make_document([1, 2], [1, 1])])
    rows = pack(made.lengths, "none", 4, 0)
    with pytest.raises(DataError, match="disk on fire"):
        write_packed(tmp_path / "p.arrow", rows_of(rows, made), packed_metadata(rows, made, 0))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match=r"ends in \.arrow, \.parquet or \.npy; got '\.bin'"):
        write_packed(tmp_path / "p.bin", rows_of(rows, made), packed_metadata(rows, made, 0))


def test_fingerprint_follows_documents_and_packing(tmp_path):
    def fingerprint(name, made, **options):
        written(tmp_path / name, made, **options)
        return PackedFile(tmp_path / name).fingerprint

    lengths = [3, 9, 16, 1, 5]
    first = fingerprint("a.arrow", documents(lengths))
    assert fingerprint("b.parquet", documents(lengths)) == first
    assert fingerprint("c.arrow", documents(lengths, seed=1)) != first
    assert fingerprint("d.arrow", documents(lengths), seed=1) != first
