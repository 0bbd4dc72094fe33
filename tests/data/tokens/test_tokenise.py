"""Sources to documents: every record used or accounted for, and a cache hit when nothing that matters changed."""

import json
import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.config.schema import DataConfig, Source
from freight.data.documents import InMemoryDocuments
from freight.data.render.tokenizer import Encoder
from freight.data.tokens.token_store import StoredDocuments
from freight.data.tokens.tokenise import remarks, tokenise
from freight.errors import DataError
from tests.data.small_tokenizer import CHATML, REWRITING, small_tokenizer

TOKENIZER = small_tokenizer()
VOCABULARY = len(TOKENIZER)


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path, *records):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def run(train, tokenizer=TOKENIZER, output_dir=None, vocab_size=VOCABULARY, progress=None, processes=None, **options):
    options = {"sequence_length": 256, "cache_dir": None, **options}
    config = DataConfig(train=train, **options)
    return tokenise(
        config.train,
        config,
        tokenizer,
        vocab_size=vocab_size,
        output_dir=output_dir,
        progress=progress,
        processes=processes,
    )


def texts(documents):
    return [Encoder(TOKENIZER).decode(documents[index].ids) for index in range(len(documents))]


def same(one, other):
    assert len(one) == len(other)
    assert one.fingerprint == other.fingerprint
    assert one.metadata == other.metadata
    for index in range(len(one)):
        assert one[index].ids.tolist() == other[index].ids.tolist()
        assert one[index].loss_mask.tolist() == other[index].loss_mask.tolist()
        assert one[index].tail_label == other[index].tail_label
        assert one.origin(index) == other.origin(index)
        assert one.source_of(index) == other.source_of(index)


def test_cached_and_in_memory_are_the_same_documents(tmp_path):
    sources = (
        write(tmp_path / "chat.jsonl", chat("a", "b"), chat("c", "dé日")),
        write(tmp_path / "text.jsonl", *({"text": "x" * length} for length in (3, 600))),
    )
    cached = run(sources, cache_dir=str(tmp_path / "cache"))
    memory = run(sources)
    assert isinstance(cached, StoredDocuments) and isinstance(memory, InMemoryDocuments)
    same(cached, memory)
    same(pickle.loads(pickle.dumps(cached)), memory)
    same(run(sources, cache_dir=str(tmp_path / "cache")), memory)
    assert cached.origin(1) == f"{tmp_path}/chat.jsonl:2"
    assert [cached.source_of(index) for index in range(len(cached))] == ["chat"] * 2 + ["text"] * 4
    assert cached.metadata["format"] == "mixed" and cached.lengths.tolist() == [len(memory[i]) for i in range(6)]


def entries(cache):
    return sorted(path.name for path in (cache / "tokenized").iterdir())


def test_the_cache_is_keyed_by_content(tmp_path):
    cache = tmp_path / "cache"
    path = tmp_path / "chat.jsonl"
    source = write(path, chat("a", "b"))
    options = {"cache_dir": str(cache)}
    run(source, **options)
    (first,) = entries(cache)
    written = (cache / "tokenized" / first / "documents-00000.arrow").stat().st_mtime_ns
    os.utime(path, (1, 1))
    run(source, small_tokenizer(), **options)
    assert entries(cache) == [first]
    assert (cache / "tokenized" / first / "documents-00000.arrow").stat().st_mtime_ns == written
    changes = [
        lambda: run(source, train_on="all", **options),
        lambda: run(source, sequence_length=128, **options),
        lambda: run(source, on_bad_record="skip", **options),
        lambda: run(source, vocab_size=VOCABULARY + 1, **options),
        lambda: run(source, small_tokenizer(CHATML + "{# x #}"), **options),
        lambda: run(source, small_tokenizer(merges=(("a", "b"),)), **options),
        lambda: run(write(path, chat("a", "c")), **options),
    ]
    for number, change in enumerate(changes, start=2):
        change()
        assert len(entries(cache)) == number


def test_a_damaged_entry_is_made_again_and_a_failed_one_leaves_nothing(tmp_path):
    cache = tmp_path / "cache"
    source = write(tmp_path / "chat.jsonl", chat("a", "b"))
    run(source, cache_dir=str(cache))
    (entry,) = entries(cache)
    (cache / "tokenized" / entry / "documents-00000.arrow").write_bytes(b"ARROW1")
    same(run(source, cache_dir=str(cache)), run(source))
    with pytest.raises(DataError):
        run(write(tmp_path / "bad.jsonl", chat("a", "b"), "{"), cache_dir=str(cache))
    assert entries(cache) == [entry]


def test_what_a_killed_process_of_the_same_id_left_is_no_obstacle(tmp_path):
    source = write(tmp_path / "chat.jsonl", chat("a", "b"))
    run(source, cache_dir=str(tmp_path / "first"))
    (entry,) = entries(tmp_path / "first")
    (tmp_path / "second/tokenized" / f".{entry}.{os.getpid()}").mkdir(parents=True)
    same(run(source, cache_dir=str(tmp_path / "second")), run(source))


def test_a_bad_record_stops_the_run_with_file_line_field_and_fix(tmp_path):
    source = write(tmp_path / "train.jsonl", chat("a", "b"), "", {"messages": [{"role": "user", "content": 5}]})
    with pytest.raises(DataError) as caught:
        run(source, output_dir=tmp_path / "out")
    assert str(caught.value) == (
        f"{source}:3: messages[0].content: expected text, list of parts or null, got 5; "
        "fix the record or set data.on_bad_record=skip"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cached", [False, True])
def test_skipped_records_are_counted_and_written(tmp_path, cached):
    long = chat("a", "z" * 9000)
    bad = ["{", "[1]", {"messages": 5}, {"other": 1}, chat("a", None)]
    source = write(tmp_path / "train.jsonl", chat("a", "b"), *bad, long, chat("c", "d"))
    options = {"on_bad_record": "skip", "max_skipped_fraction": 1.0, "truncation": "drop", "format": "messages"}
    for attempt in ("one", "two"):
        out = tmp_path / attempt
        documents = run(source, output_dir=out, cache_dir=str(tmp_path / "cache") if cached else None, **options)
        metadata = documents.metadata
        assert metadata["skipped"] == {
            "invalid_json": 1,
            "not_an_object": 1,
            "wrong_type": 1,
            "missing_field": 2,
            "too_long": 1,
        }
        assert metadata["records_read"] == 8 == metadata["records_used"] + sum(metadata["skipped"].values())
        assert metadata["tokens_dropped"] > 9000
        lines = [json.loads(line) for line in (out / "rejects-train.jsonl").read_text().splitlines()]
        assert [line["line"] for line in lines] == [2, 3, 4, 5, 6, 7]
        assert lines[0]["file"] == source and lines[0]["raw"] == "{" and lines[0]["reason"] == "invalid_json"
        assert lines[4]["field"] == "messages[1].content"
        assert len(lines[5]["raw"]) == 4096 and lines[5]["raw_bytes"] == len(json.dumps(long))
    run(write(tmp_path / "train.jsonl", chat("a", "b")), output_dir=tmp_path / "two")
    assert not (tmp_path / "two" / "rejects-train.jsonl").exists()


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["good", "{", "[]", '{"messages": []}', "", "long"]), min_size=1, max_size=12))
def test_read_is_used_plus_rejected(tmp_path_factory, kinds):
    path = tmp_path_factory.getbasetemp() / "books.jsonl"
    rows = {"good": chat("a", "b"), "long": chat("a", "b" * 300)}
    source = write(path, *(rows.get(kind, kind) for kind in kinds))
    options = {"on_bad_record": "skip", "max_skipped_fraction": 1.0, "truncation": "drop", "format": "messages"}
    out = tmp_path_factory.getbasetemp() / "books"
    good = [number for number, kind in enumerate(kinds, start=1) if kind == "good"]
    if not good:
        with pytest.raises(DataError, match="0 usable records"):
            run(source, output_dir=out, **options)
        return
    documents = run(source, output_dir=out, **options)
    assert [documents.origin(index) for index in range(len(documents))] == [f"{path}:{number}" for number in good]
    rejected = [number for number, kind in enumerate(kinds, start=1) if kind not in ("good", "")]
    file = out / "rejects-books.jsonl"
    lines = [json.loads(line)["line"] for line in file.read_text().splitlines()] if file.exists() else []
    assert lines == rejected and documents.metadata["records_read"] == len(good) + len(rejected)


def test_too_many_bad_records_are_an_error_with_counts(tmp_path):
    source = write(tmp_path / "train.jsonl", *[chat("a", "b")] * 9, "{")
    with pytest.raises(
        DataError, match=r"1 of 10 records are bad \(1 invalid_json\), above data.max_skipped_fraction 0.01"
    ):
        run(source, on_bad_record="skip")
    assert len(run(source, on_bad_record="skip", max_skipped_fraction=0.1)) == 9


def test_documents_too_long_stop_with_how_common_they_are(tmp_path):
    source = write(tmp_path / "train.jsonl", chat("a", "b"), chat("a", "x" * 600), chat("a", "x" * 300))
    with pytest.raises(DataError) as caught:
        run(source, on_bad_record="skip")
    assert str(caught.value) == (
        f"{source}:2: 622 tokens > data.sequence_length 256 (2 of the first 3 records are). "
        "Set data.truncation=drop or cut_right, or data.sequence_length=1024"
    )


def test_text_is_split_by_default_and_chats_never(tmp_path):
    documents = run(write(tmp_path / "t.jsonl", {"text": "x" * 600}))
    assert documents.lengths.tolist() == [256, 256, 90] and documents.metadata["truncation"] == "split"
    assert documents.metadata["records_used"] == 1
    with pytest.raises(DataError, match="split cuts answers from their prompts"):
        run(write(tmp_path / "c.jsonl", chat("a", "b")), truncation="split")


def test_a_wrong_template_or_tokenizer_stops_even_when_skipping(tmp_path):
    reasoned = [*chat("a", "<think>x</think>b")["messages"], *chat("c", "d")["messages"]]
    source = write(tmp_path / "r.jsonl", *[{"messages": reasoned}] * 3, chat("a", "b"))
    options = {"on_bad_record": "skip", "max_skipped_fraction": 1.0}
    with pytest.raises(DataError, match="3 of the first 4 records are unstable_template"):
        run(source, small_tokenizer(REWRITING), **options)
    with pytest.raises(DataError, match=r"below model.vocab_size 100.*id_out_of_range: that is a wrong template"):
        run(source, vocab_size=100, **options)


def test_a_template_without_turn_ends_is_refused(tmp_path):
    source = write(tmp_path / "c.jsonl", chat("a", "b"))
    with pytest.raises(DataError, match="no assistant turn ends in a special token"):
        run(source, small_tokenizer(CHATML.replace("<|im_end|>", "")))


def test_a_chat_without_template_is_refused_and_a_shipped_one_can_be_named(tmp_path):
    source = write(tmp_path / "c.jsonl", chat("a", "b"))
    with pytest.raises(DataError, match="no chat template"):
        run(source, small_tokenizer(None))
    named = run(source, small_tokenizer(None), chat_template="chatml")
    assert texts(named) == ["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"]
    assert "<eos>" in texts(run(source, small_tokenizer(None), chat_template="plain"))[0]


def test_parquet_rows_are_records(tmp_path):
    rows = [
        {"messages": chat("a", "b")["messages"], "text": None},
        {"messages": chat("c", "d")["messages"], "text": "x"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=1)
    documents = run(str(tmp_path / "rows.parquet"))
    same_texts = texts(run(write(tmp_path / "rows.jsonl", chat("a", "b"), chat("c", "d"))))
    assert texts(documents) == same_texts
    assert documents.origin(1) == f"{tmp_path}/rows.parquet: row 2"
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        run(str(tmp_path / "broken.parquet"))


def test_text_files_of_a_folder_in_bytewise_order(tmp_path):
    folder = tmp_path / "books"
    (folder / "b").mkdir(parents=True)
    for name, text in [("b/1.txt", "two"), ("a.md", "one"), ("é.txt", "four"), ("c.txt", "three")]:
        (folder / name).write_bytes(b"\xef\xbb\xbf" + text.encode() if name == "c.txt" else text.encode())
    assert texts(run(str(folder))) == [f"<bos>{text}<eos>" for text in ("one", "two", "three", "four")]


def test_sources_keep_their_order_names_and_limits(tmp_path):
    first = write(tmp_path / "data.jsonl", *({"text": f"a{i}"} for i in range(5)))
    (tmp_path / "x").mkdir()
    second = write(tmp_path / "x" / "data.jsonl", {"body": "b"})
    sources = (
        Source(path=first, max_records=2),
        Source(path=second, fields={"text": "body"}),
        Source(path=first, name="again", max_records=1),
    )
    documents = run(sources)
    assert texts(documents) == [f"<bos>{text}<eos>" for text in ("a0", "a1", "b", "a0")]
    assert [documents.source_of(index) for index in range(4)] == ["data", "data", "data-2", "again"]
    assert [source["records"] for source in documents.metadata["sources"]] == [2, 1, 1]


def test_renamed_fields_must_exist(tmp_path):
    source = write(tmp_path / "t.jsonl", {"text": "a", "body": "b"})
    assert texts(run(source, fields={"text": "body"})) == ["<bos>b<eos>"]
    with pytest.raises(DataError, match="no record has a column 'tools_json'"):
        run(write(tmp_path / "c.jsonl", chat("a", "b")), fields={"tools": "tools_json"})
    with pytest.raises(DataError, match="has 'txt', which no format has; did you mean 'text'"):
        run(source, fields={"txt": "body"})


def test_the_summary_says_what_was_noticed(tmp_path):
    tokenizer = small_tokenizer(merges=(("Ċ", "b"),))
    extra = {**chat("a", "b"), "id": 7}
    seen = []
    documents = run(
        write(tmp_path / "c.jsonl", *[extra] * 3),
        tokenizer,
        progress=lambda done, total, what: seen.append((done, total)),
    )
    metadata = documents.metadata
    assert metadata["ignored_keys"] == {"id": 3} and "keys that are not used: id (3)" in metadata["notices"]
    assert "format messages (detected)" in metadata["notices"][0]
    assert metadata["straddling_tokens"] == 3 and "'\\nb'" in metadata["warnings"][0]
    assert metadata["supervised_share"] == pytest.approx(metadata["num_target_tokens"] / metadata["num_tokens"])
    assert metadata["length_quantiles"]["0.0"] == documents.lengths.min()
    assert seen[-1] == ((tmp_path / "c.jsonl").stat().st_size,) * 2
    assert metadata["pad_id"] == tokenizer.pad_token_id and metadata["template_hash"]
    assert json.loads(json.dumps(metadata)) == metadata


def test_a_template_that_leaves_questions_out_is_told(tmp_path):
    last = "{% generation %}{{ messages[-1].content }}<|im_end|>{% endgeneration %}"
    documents = run(write(tmp_path / "c.jsonl", chat("why?", "b"), chat("why?", "c")), small_tokenizer(last))
    (warning,) = documents.metadata["warnings"]
    assert warning == (
        "the chat template leaves out a user's or system message of 2 records among those looked at, such as 'why?'"
    )
    assert run(write(tmp_path / "c.jsonl", chat(" why? ", "b"))).metadata["warnings"] == []


def test_names_that_the_template_does_not_write_are_told(tmp_path):
    named = chat("a", "b")
    named["messages"][0]["name"] = "Ann"
    source = write(tmp_path / "c.jsonl", named, chat("a", "b"))
    assert run(source).metadata["ignored_keys"] == {"messages.name": 1}
    writing = small_tokenizer(CHATML.replace("m.role +", "m.role + (m.name or '') +"))
    documents = run(source, writing)
    assert documents.metadata["ignored_keys"] == {} and "<|im_start|>userAnn" in texts(documents)[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "0 records; the source is empty"),
        ("\n \n", "0 records"),
        ("{\n{", "none of the first 2 records can be parsed"),
    ],
)
def test_nothing_to_read_is_an_error(tmp_path, content, words):
    with pytest.raises(DataError, match=words):
        run(write(tmp_path / "e.jsonl", content))


def test_large_batches_and_many_arrow_batches_keep_every_document(tmp_path, monkeypatch):
    monkeypatch.setattr("freight.data.tokens.token_store.BATCH_TOKENS", 40)
    monkeypatch.setattr("freight.data.tokens.record_batches.BATCH_RECORDS", 3)
    source = write(tmp_path / "t.jsonl", *({"text": "abc" * (i % 5 + 1)} for i in range(50)))
    cached = run(source, cache_dir=str(tmp_path / "cache"))
    same(cached, run(source))
    assert np.array_equal(cached.lengths, [3 * (i % 5 + 1) + 2 for i in range(50)])
    with pytest.raises(IndexError):
        cached[50]


def test_remarks_account_for_every_record_and_are_empty_for_a_packed_file():
    metadata = {
        "notices": ["a.jsonl: format text (detected)"],
        "warnings": ["odd"],
        "records_read": 5,
        "records_used": 3,
        "skipped": {"too_long": 2, "empty": 0},
    }
    notices, warnings = remarks(metadata)
    assert notices == ["a.jsonl: format text (detected)", "records: 5 read = 3 used + 2 left out (too_long 2)"]
    assert warnings == ["odd"]
    assert remarks({}) == ([], [])
