"""Packed files between formats, and training straight from NeMo's."""

from itertools import pairwise

import pytest

from freight.data.load.build import open_rows
from freight.data.load.loader import StepLoader
from freight.data.pack.convert_packed import convert
from freight.data.pack.npy_file import NpyFile
from freight.data.pack.packed_file import PackedFile
from freight.errors import ConfigError, DataError
from tests.data.load.test_build import config_of, packed, texts, tokenizer_of  # noqa: F401 - texts is a fixture
from tests.data.pack.test_npy_file import GOOD, saved


def rows_of(file):
    names = ("ids", "loss_mask", "lengths", "tail_labels")
    return [[getattr(row, name).tolist() for name in names] for row in file]


@pytest.mark.parametrize("mask", ["token", "label"])
@pytest.mark.parametrize("algorithm", ["first_fit_shuffle", "none"])
def test_through_every_format_and_back(texts, tmp_path, mask, algorithm):  # noqa: F811
    file = packed(config_of(texts, packing={"algorithm": algorithm}), tmp_path)
    way = [file.path, *(tmp_path / name for name in ("a.parquet", "b.arrow", "c.npy", "d.parquet", "e.npy"))]
    for source, output in pairwise(way):
        npy = {"npy_mask": mask} if ".npy" in (source.suffix, output.suffix) else {}
        told = {"pack_size": 8, "tokenizer": tokenizer_of()} if source.suffix == ".npy" else {}
        metadata = convert(source, output, **npy, **told)
        assert metadata["num_rows"] == len(file)
    assert PackedFile(way[2]).metadata == file.metadata, "Arrow and Parquet say the same"
    assert PackedFile(way[2]).fingerprint == file.fingerprint
    assert rows_of(PackedFile(way[4])) == rows_of(NpyFile(way[5], mask)) == rows_of(file)
    kept = ("tokenizer_hash", "pad_id", "num_tokens", "num_target_tokens", "packing_factor", "fill")
    assert {k: PackedFile(way[4]).metadata[k] for k in kept} == {k: file.metadata[k] for k in kept}


def test_what_an_npy_file_does_not_say_is_asked_for(tmp_path):
    path, out = saved(tmp_path / "x.npy", [GOOD]), tmp_path / "x.arrow"
    with pytest.raises(ConfigError, match="`--npy-mask` must be token or label; it is missing"):
        convert(path, out, pack_size=4)
    with pytest.raises(ConfigError, match=r"`--pack-sizes` is missing.*The fullest of .*x.npy has 2 tokens"):
        convert(path, out, npy_mask="token")
    with pytest.raises(DataError, match="row 0: has 2 tokens, more than --pack-sizes 1"):
        convert(path, out, npy_mask="token", pack_size=1)
    large = saved(tmp_path / "y.npy", [GOOD, GOOD | {"input_ids": [1, 2, 3, 99]}])
    with pytest.raises(DataError, match="row 1: id 99 is outside the tokenizer's 12"):
        convert(large, out, npy_mask="token", pack_size=4, tokenizer=tokenizer_of())
    with pytest.raises(DataError, match="holds no rows"):
        convert(saved(tmp_path / "z.npy", []), out, npy_mask="token", pack_size=4)
    assert not out.exists()
    facts = convert(path, out, npy_mask="token", pack_size=4)
    assert (facts["tokenizer_hash"], facts["vocab_size"], facts["algorithm"], facts["seed"]) == (
        None,
        5,
        "imported",
        None,
    )
    assert "cannot be looked for" in facts["notices"][0]


def test_pads_taken_for_targets_are_warned_of(tmp_path):
    path = saved(tmp_path / "x.npy", [{"input_ids": [5, 0, 0], "loss_mask": [1, 1, 1], "seq_start_id": [0]}, GOOD])
    facts = convert(path, tmp_path / "x.arrow", npy_mask="token", pack_size=4, tokenizer=tokenizer_of())
    assert "1 of 2 rows have a sequence that ends in several targets with the pad id" in facts["warnings"][0]


def test_impossible_conversions_are_listed_together(texts, tmp_path):  # noqa: F811
    file = packed(config_of(texts, packing={}), tmp_path)
    with pytest.raises(ConfigError) as caught:
        convert(file.path, tmp_path / "x.json", npy_mask="token", pack_size=8, tokenizer=tokenizer_of())
    assert len(caught.value.faults) == 4
    with pytest.raises(ConfigError, match="is the file to convert itself"):
        convert(file.path, file.path, force=True)
    (tmp_path / "there.parquet").touch()
    with pytest.raises(ConfigError, match=r"exists\. Use --force"):
        convert(file.path, tmp_path / "there.parquet")
    convert(file.path, tmp_path / "there.parquet", force=True)
    with pytest.raises(DataError, match=r"row \d+ ends in a piece of a document that goes on in another row"):
        convert(file.path, tmp_path / "x.npy", npy_mask="token")
    assert not list(tmp_path.glob("*x.npy*"))


def batches(rows):
    loader = StepLoader(rows, rows_per_step=2, micro_batch_tokens=16, epochs=1)
    return sorted(
        (tuple(batch.input_ids.tolist()), tuple(batch.labels.tolist()), batch.cu_seqlens)
        for step in loader
        for batch in step.microbatches
    )


@pytest.mark.parametrize("cached", [True, False])
def test_training_reads_an_npy_file_as_it_reads_its_conversion(texts, tmp_path, cached):  # noqa: F811
    file = packed(config_of(texts, packing={"algorithm": "first_fit_shuffle"}), tmp_path)
    npy = tmp_path / "x.npy"
    convert(file.path, npy, npy_mask="label")
    packing = {"npy_mask": "label", "pack_size": 8}
    cache = str(tmp_path / "cache") if cached else None

    def rows(**data):
        config = config_of(texts, **{"cache_dir": cache, "shuffle": False, **data})
        return open_rows(config, 0, "train", tokenizer_of(), vocab_size=16, rejects_dir=None)

    straight = rows(train=str(npy), packing=packing)
    assert batches(straight) == batches(rows(train=None, packing=packing | {"file": str(npy)}))
    assert batches(straight) == batches(rows(train=str(file.path)))
    stored = list((tmp_path / "cache").rglob("*.arrow"))
    assert len(stored) == cached
    with pytest.raises(ConfigError, match=r"`data.train` has no effect: the rows come from .*x.npy"):
        rows(packing=packing | {"file": str(npy)})
    with pytest.raises(ConfigError, match=r"pack_size. is 16, but|more than data.packing.pack_size"):
        rows(train=str(file.path), packing={"pack_size": 16})


def test_a_packed_file_that_is_older_than_its_source_is_refused(texts, tmp_path):  # noqa: F811
    file = packed(config_of(texts, packing={}), tmp_path)
    config = config_of(texts, packing={"file": str(file.path)})

    def rows():
        return open_rows(config, 0, "train", tokenizer_of(), vocab_size=16, rejects_dir=None)

    assert rows().source_of(0) == "texts"
    texts.write_text(texts.read_text() + '{"text": "a"}\n')
    with pytest.raises(DataError, match=r"was not packed from .*texts.jsonl as it is now"):
        rows()


def test_every_document_of_a_file_knows_its_source(tmp_path):
    for name, count in (("one", 3), ("two", 5)):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a b"}\n' * count)
    sources = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    config = config_of("x", train=sources, packing={"algorithm": "none"})
    file = packed(config, tmp_path / "packed")
    rows = open_rows(config_of(file.path), 0, "train", tokenizer_of(), vocab_size=16, rejects_dir=None)
    in_memory = open_rows(config, 0, "train", tokenizer_of(), vocab_size=16, rejects_dir=None)
    names = [rows.source_of(document) for document in range(8)]
    assert names == [in_memory.source_of(document) for document in range(8)] == ["one"] * 3 + ["two"] * 5
