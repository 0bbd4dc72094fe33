import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from freight.config.schema import DataConfig, Source
from freight.data.load.build import open_rows
from freight.data.load.loader import StepLoader
from freight.data.load.pack_files import pack_to_files
from freight.data.pack.packed_file import PackedFile, read_metadata
from freight.errors import ConfigError, DataError

WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", *"abcdefgh"]
TEMPLATE = "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' <eos> ' }}{% endfor %}"


def tokenizer_of(words=WORDS, template=TEMPLATE):
    """One token per word."""
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", chat_template=template)


@pytest.fixture
def texts(tmp_path):
    """Documents of 2 to 8 tokens, the end-of-text token among them."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join("abcdefgh"[: 1 + i % 7])}) + "\n" for i in range(20)))
    return path


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(10)))
    return path


def config_of(path, **data):
    return DataConfig.model_validate({"train": str(path), "sequence_length": 8, "cache_dir": None, **data})


def rows_of(config, which="train", tokenizer=None, vocab_size=16, seed=0):
    tokenizer = tokenizer or tokenizer_of()
    return open_rows(config, seed, which, tokenizer, vocab_size=vocab_size, rejects_dir=None)


def packed(config, folder, **options):
    (report,) = pack_to_files(config, tokenizer_of(), folder, vocab_size=16, **options)
    return PackedFile(report.output)


def test_text_is_split_and_conversations_are_kept_whole(texts, chats):
    text_rows = rows_of(config_of(texts, packing={}))
    assert text_rows.packing["algorithm"] == "split"
    assert text_rows.num_rows == -(-text_rows.num_tokens // 8)
    assert rows_of(config_of(chats, packing={})).packing["algorithm"] == "first_fit_shuffle"


def test_without_packing_each_document_has_its_row(texts):
    rows = rows_of(config_of(texts))
    assert (rows.num_rows, rows.num_documents, rows.packing_factor) == (20, 20, 1.0)
    assert rows.pack_size == 8


def test_seeds_fall_back_from_packing_to_data_to_train(texts):
    assert rows_of(config_of(texts, packing={}), seed=7).packing["seed"] == 7
    assert rows_of(config_of(texts, packing={}, seed=5), seed=7).packing["seed"] == 5
    assert rows_of(config_of(texts, packing={"seed": 3}, seed=5), seed=7).packing["seed"] == 3
    assert rows_of(config_of(texts, packing={"seed": 3}, seed=5), seed=7).seed == 5


def test_validation_is_never_shuffled(texts):
    rows = rows_of(config_of(texts, validation=str(texts), packing={"algorithm": "none"}), "validation")
    assert [int(rows.row(0, 0, n).documents[0]) for n in range(20)] == list(range(20))


def test_validation_without_packing_computes_no_padding_rows_and_still_every_document_once(texts):
    rows = rows_of(config_of(texts, validation=str(texts)), "validation")
    found = [int(document) for n in range(rows.num_rows) for document in rows.row(0, 0, n).documents]
    assert rows.num_rows < len(found)
    assert sorted(found) == list(range(rows.num_documents))
    with pytest.raises(ConfigError, match=r"data\.validation. is missing"):
        rows_of(config_of(texts), "validation")


def test_what_cannot_be_is_refused_before_anything_is_read(tmp_path):
    missing = tmp_path / "never-read.jsonl"
    with pytest.raises(ConfigError, match=r"`data.sequence_length` 8 > pack_size 4: a document must fit in a row"):
        rows_of(config_of(missing, packing={"pack_size": 4}))
    with pytest.raises(ConfigError, match="split cuts answers from their prompts"):
        rows_of(config_of(missing, packing={"algorithm": "split"}, format="messages"))
    with pytest.raises(ConfigError, match=r"multiple of data\.packing\.document_multiple 3; got 8\. Use 6 or 9"):
        rows_of(config_of(missing, packing={"document_multiple": 3}))


def test_what_a_packed_file_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.streaming. has no effect on a packed file"):
        packed(config_of(tmp_path, streaming=True), tmp_path)
    weighted = config_of(tmp_path).model_copy(
        update={"train": (Source(path="a", weight=1), Source(path="b", weight=2))}
    )
    with pytest.raises(ConfigError, match=r"weight. has no effect in a packed file"):
        packed(weighted, tmp_path)


def test_weights_reach_the_rows(texts, chats):
    sources = [{"path": str(texts), "weight": 1}, {"path": str(texts), "weight": 3}]
    rows = rows_of(config_of("-").model_validate({**config_of("-").model_dump(exclude_unset=True), "train": sources}))
    assert rows.packing["weights"] == {"texts": 1, "texts-2": 3}
    documents = [int(d) for n in range(rows.num_rows) for d in rows.row(0, 0, n).documents]
    assert sum(d >= 20 for d in documents) == 30


def test_split_is_refused_for_detected_conversations(chats):
    with pytest.raises(ConfigError, match=r"split cuts answers from their prompts \(format messages\)"):
        rows_of(config_of(chats, packing={"algorithm": "split"}))


def test_a_packed_file_is_found_wherever_it_is_named(texts, tmp_path):
    file = packed(config_of(texts, packing={}), tmp_path / "packed")
    for config in (
        config_of(texts, packing={"file": str(file.path)}),
        config_of(texts, packing={"file": str(tmp_path / "packed")}),
        config_of(file.path),
        config_of(file.path, format="packed"),
        config_of(texts, packing={"file": str(file.path), "pack_size": 8, "algorithm": "split"}),
    ):
        rows = rows_of(config)
        assert rows.fingerprint == file.fingerprint
        assert (rows.num_rows, rows.num_documents) == (len(file), 20)


def test_a_folder_of_packed_files_is_chosen_from_by_size(texts, tmp_path):
    config = config_of(texts, packing={})
    pack_to_files(config, tokenizer_of(), tmp_path / "packed", pack_sizes=[8, 16], vocab_size=16)
    assert rows_of(config_of(texts, packing={"file": str(tmp_path / "packed"), "pack_size": 16})).pack_size == 16
    with pytest.raises(DataError, match=r"2 packed files in this folder \(packed_16_seed0.arrow, packed_8_seed0"):
        rows_of(config_of(texts, packing={"file": str(tmp_path / "packed")}))
    with pytest.raises(DataError, match="0 packed files with pack_size 32"):
        rows_of(config_of(texts, packing={"file": str(tmp_path / "packed"), "pack_size": 32}))


def test_every_contradiction_with_a_packed_file_is_listed(texts, tmp_path):
    file = packed(config_of(texts, packing={}), tmp_path / "packed", pack_sizes=[16])
    wrong = {
        "file": str(file.path),
        "pack_size": 32,
        "algorithm": "none",
        "seed": 4,
        "document_multiple": 2,
        "window_documents": 9,
    }
    with pytest.raises(ConfigError) as caught:
        rows_of(config_of(texts, packing=wrong, sequence_length=4))
    assert len(caught.value.faults) == 6
    assert f"`data.packing.seed` is 4, but {file.path} was packed with 0; leave it out." in caught.value.faults
    assert "packed with 8 in rows of 16; set it to 8" in str(caught.value)
    rows_of(config_of(texts, packing={"file": str(file.path)}, sequence_length=16))


def test_a_packed_file_of_another_tokenizer_template_or_vocabulary_is_refused(chats, tmp_path):
    file = packed(config_of(chats), tmp_path / "packed")
    config = config_of(chats, packing={"file": str(file.path)})
    rows_of(config)
    with pytest.raises(DataError, match="packed with another tokenizer"):
        rows_of(config, tokenizer=tokenizer_of([*WORDS, "i"]))
    with pytest.raises(DataError, match="packed with another chat template"):
        rows_of(config, tokenizer=tokenizer_of(template=TEMPLATE + " "))
    with pytest.raises(DataError, match="vocabulary of 16, the model 12"):
        rows_of(config, vocab_size=12)


def test_packing_to_files_writes_a_file_a_report_and_a_picture_per_size(texts, tmp_path):
    said = []
    reports = pack_to_files(
        config_of(texts, packing={"seed": 3}),
        tokenizer_of(),
        tmp_path / "packed",
        pack_sizes=[8, 16],
        file_format="parquet",
        progress=lambda done, total, what: said.append((done, total, what)),
    )
    names = {path.name for path in (tmp_path / "packed").iterdir()}
    assert names == {f"packed_{size}_seed3.{kind}" for size in (8, 16) for kind in ("parquet", "json", "png")}
    for report, size in zip(reports, (8, 16), strict=True):
        assert json.loads((tmp_path / "packed" / f"packed_{size}_seed3.json").read_text()) == report.as_dict()
        assert (report.pack_size, report.algorithm, report.reused) == (size, "split", False)
        assert len(PackedFile(report.output)) == report.rows
    assert said[-1][0] == said[-1][1] == reports[1].rows


def test_equal_packing_is_reused_and_other_packing_is_kept_unless_forced(texts, tmp_path):
    config = config_of(texts, packing={})
    file = packed(config, tmp_path)
    before = file.path.stat().st_mtime_ns
    (again,) = pack_to_files(config, tokenizer_of(), tmp_path, vocab_size=16)
    assert again.reused
    assert file.path.stat().st_mtime_ns == before
    other = config_of(texts, packing={"algorithm": "first_fit_decreasing"})
    with pytest.raises(ConfigError, match=r"packed otherwise \(algorithm split -> first_fit_decreasing"):
        pack_to_files(other, tokenizer_of(), tmp_path, vocab_size=16, pack_sizes=[16, 8])
    assert not (tmp_path / "packed_16_seed0.arrow").exists(), "nothing is half-written"
    packed(other, tmp_path, force=True)
    assert read_metadata(file.path)["algorithm"] == "first_fit_decreasing"
    file.path.write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="exists and cannot be reused"):
        packed(other, tmp_path)
    packed(other, tmp_path, force=True)


@pytest.mark.parametrize("what", ["compare", "dry_run"])
def test_looking_writes_nothing(texts, tmp_path, what):
    reports = pack_to_files(config_of(texts), tokenizer_of(), tmp_path / "packed", **{what: True})
    assert not (tmp_path / "packed").exists()
    algorithms = [report.algorithm for report in reports]
    assert algorithms == (
        ["first_fit_decreasing", "first_fit_shuffle", "best_fit_decreasing", "none", "split"]
        if what == "compare"
        else ["split"]
    )


def test_comparing_conversations_leaves_split_out(chats, tmp_path):
    reports = pack_to_files(config_of(chats), tokenizer_of(), tmp_path, compare=True, pack_sizes=[8, 16])
    assert "split" not in {report.algorithm for report in reports}
    assert [bool(report.advice) for report in reports] == 2 * [True, False, False, False]


def test_impossible_requests_are_listed_together(tmp_path):
    missing = config_of(tmp_path / "never-read.jsonl", packing={"document_multiple": 2})
    with pytest.raises(ConfigError) as caught:
        pack_to_files(missing, tokenizer_of(), tmp_path, pack_sizes=[9, 4, 9], file_format="json")
    assert len(caught.value.faults) == 4
    assert "names 9 more than once" in str(caught.value)
    assert "must be arrow, parquet, npy; got 'json'" in str(caught.value)


def test_rows_from_file_and_memory_train_on_the_same_tokens(texts, tmp_path):
    config = config_of(texts, packing={})
    file = packed(config, tmp_path)

    def pairs(rows):
        loader = StepLoader(rows, rows_per_step=3, micro_batch_tokens=16, epochs=1)
        return sorted(
            pair
            for step in loader
            for batch in step.microbatches
            for pair in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True)
            if pair[1] >= 0
        )

    assert pairs(rows_of(config)) == pairs(rows_of(config_of(file.path)))


def test_rejects_of_training_and_validation_are_kept_apart(tmp_path):
    for which in ("train", "validation"):
        (tmp_path / which).mkdir()
        (tmp_path / which / "a.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n' + f'["{which}"]\n')
    skip = {"format": "text", "on_bad_record": "skip", "max_skipped_fraction": 1.0}
    config = config_of(tmp_path / "train/a.jsonl", validation=str(tmp_path / "validation/a.jsonl"), **skip)
    for which in ("train", "validation"):
        open_rows(config, 0, which, tokenizer_of(), vocab_size=16, rejects_dir=tmp_path / "run")
    assert '["train"]' in json.loads((tmp_path / "run/rejects-a.jsonl").read_text())["raw"]
    assert '["validation"]' in json.loads((tmp_path / "run/validation/rejects-a.jsonl").read_text())["raw"]
