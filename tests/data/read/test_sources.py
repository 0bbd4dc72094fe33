import json

import datasets
import pyarrow as pa
import pytest

from freight.config.schema import DataConfig, Source
from freight.data.read.readers import read_file
from freight.data.read.sources import resolve_sources, short_name, unique_name
from freight.errors import DataError


def resolve(entries, **options):
    return resolve_sources(entries, DataConfig(train="-", sequence_length=8, **options))


def names(source):
    return [path.name for path in source.files]


def test_a_glob_sorts_bytewise_and_goes_deep(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "B.jsonl", "a.jsonl", "sub/c.jsonl", "x.txt"):
        (tmp_path / name).write_text("")
    assert names(resolve(f"{tmp_path}/*.jsonl")[0]) == ["B.jsonl", "a.jsonl", "b.jsonl"]
    assert names(resolve(f"{tmp_path}/**/*.jsonl")[0]) == ["B.jsonl", "a.jsonl", "b.jsonl", "c.jsonl"]


def test_hidden_and_foreign_files_of_a_folder_are_passed_over(tmp_path):
    for name in ("a.jsonl", ".b.jsonl", "README", "c.ndjson"):
        (tmp_path / name).write_text("")
    assert names(resolve(str(tmp_path))[0]) == ["a.jsonl", "c.ndjson"]


def test_options_of_a_source_win_over_the_general_ones(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    source = Source(path=str(tmp_path / "a.jsonl"), format="text", fields={"text": "body"}, max_records=3)
    (resolved,) = resolve((source,), format="messages", fields={"text": "other", "tools": "t"})
    assert (resolved.format, resolved.fields, resolved.max_records) == ("text", {"text": "body", "tools": "t"}, 3)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("missing.jsonl", "no such file or folder"),
        ("*.parquet", "no file matches"),
        ("empty", "no data files"),
        ("mixed", r"several kinds: text \(a.txt\), jsonl \(b.jsonl\); choose with `glob`"),
        ("mixed/a.txt.gz", "only .jsonl.gz and .jsonl.zst are read compressed; decompress it first"),
        ("mixed/a.jsonl.xz", "only .jsonl.gz and .jsonl.zst are read compressed; decompress it first"),
        ("a.csv", "unknown kind '.csv'; expected one of .jsonl"),
        ("arrow", "state.json: not JSON; the saved data set is not whole"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, entry, words):
    for name in ("mixed", "empty", "arrow"):
        (tmp_path / name).mkdir()
    for name in ("mixed/a.txt", "mixed/b.jsonl", "a.csv", "arrow/state.json"):
        (tmp_path / name).write_text("")
    if entry.endswith((".gz", ".xz")):
        (tmp_path / entry).write_text("")
    with pytest.raises(DataError, match=words):
        resolve(str(tmp_path / entry))


def test_an_empty_match_shows_the_folder(tmp_path):
    (tmp_path / "train.json").write_text("")
    with pytest.raises(DataError, match=r"'.*\*.jsonl'; .* has train.json"):
        resolve(f"{tmp_path}/*.jsonl")


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("a.jsonl", {"split": "test"}, "split 'test' has no effect on plain files"),
        ("a.jsonl", {"glob": "*.jsonl"}, "glob chooses among the files of a folder, and this is none"),
        ("a.jsonl", {"fields": {"record": "line"}}, "record cuts text files, these are jsonl"),
        ("b.txt", {"fields": {"record": "page"}}, "record must be line or paragraph; got 'page'"),
        ("saved", {"glob": "*.arrow"}, "glob has no effect on a saved data set"),
        (".", {"glob": "/etc/*"}, "glob '/etc/\\*': .*; write for example"),
        (".", {"glob": "*.parquet"}, "no file matches '\\*.parquet'; .* has a.jsonl, b.txt, packed.arrow, saved"),
        ("packed.arrow", {}, "holds rows, not records; name it alone, as data.packing.file"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, path, options, words):
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    table = pa.table({"a": [1]}).replace_schema_metadata({"freight": "{}"})
    with pa.ipc.new_file(str(tmp_path / "packed.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=words):
        resolve((Source(path=str(tmp_path / path), **options),))


def test_a_glob_chooses_among_the_files_of_a_folder(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "c.txt"):
        (tmp_path / name).write_text("")
    (source,) = resolve((Source(path=str(tmp_path), glob="*.jsonl*"),))
    assert (names(source), source.kind) == (["a.jsonl.gz", "b.jsonl"], "jsonl")


def test_compressed_files_need_a_cache_or_streaming_or_a_bound(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_text("")
    with pytest.raises(DataError, match=r"a.jsonl.gz: .* set data.cache_dir or data.streaming"):
        resolve(str(path), cache_dir=None)
    assert len(resolve(str(path))) == len(resolve(str(path), cache_dir=None, streaming=True)) == 1
    assert len(resolve((Source(path=str(path), max_records=3),), cache_dir=None)) == 1


@pytest.mark.parametrize("record", ["line", "paragraph"])
def test_text_has_smaller_records_if_asked(tmp_path, record):
    (tmp_path / "a.txt").write_text("")
    (source,) = resolve(str(tmp_path / "a.txt"), fields={"record": record, "text": "text"})
    assert (source.kind, source.fields) == (record, {"text": "text"})


def saved(folder, splits):
    rows = {
        split: datasets.Dataset.from_list([{"text": f"{split} {n}", "none": None} for n in range(3)])
        for split in splits
    }
    (datasets.DatasetDict(rows) if splits != ["only"] else rows["only"]).save_to_disk(folder)


def texts(source):
    return [record.value["text"] for path in source.files for record in read_file(path, source.kind)]


def test_saved_datasets_are_read_by_split(tmp_path):
    saved(tmp_path / "one", ["only"])
    saved(tmp_path / "many", ["train", "test"])
    assert texts(resolve(str(tmp_path / "one"))[0]) == ["only 0", "only 1", "only 2"]
    assert texts(resolve(str(tmp_path / "many"))[0]) == ["train 0", "train 1", "train 2"]
    assert texts(resolve((Source(path=str(tmp_path / "many"), split="test"),))[0]) == ["test 0", "test 1", "test 2"]
    with pytest.raises(DataError, match="no split 'dev'; it has train, test"):
        resolve((Source(path=str(tmp_path / "many"), split="dev"),))
    with pytest.raises(DataError, match="holds one data set and no split 'test'"):
        resolve((Source(path=str(tmp_path / "one"), split="test"),))
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match=r"data-00000-of-00001.arrow: no such file; the saved data set is not whole"):
        resolve(str(tmp_path / "one"))


def test_the_cache_of_datasets_is_read_by_split(tmp_path):
    for name in ("d-train-00000-of-00002", "d-train-00001-of-00002", "d-test"):
        with pa.ipc.new_stream(str(tmp_path / f"{name}.arrow"), pa.schema([("text", pa.string())])) as writer:
            writer.write_table(pa.table({"text": [name]}))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"splits": {"train": {}, "test": {}}}))
    assert texts(resolve(str(tmp_path))[0]) == ["d-train-00000-of-00002", "d-train-00001-of-00002"]
    assert texts(resolve((Source(path=str(tmp_path), split="test"),))[0]) == ["d-test"]


class Hub:
    """What `datasets` gives for a name, without a network."""

    def __init__(self, monkeypatch, folder):
        saved(folder, ["only"])
        self.asked = []
        self._folder = folder
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def load(self, name, *, split, streaming):
        self.asked.append((name, split, streaming))
        if name != "owner/name":
            raise ConnectionError(f"Couldn't reach '{name}' on the Hub\nsecond line")
        data = datasets.load_from_disk(self._folder)
        return data.to_iterable_dataset(num_shards=2) if streaming else data


def test_a_name_on_the_hub_becomes_files(tmp_path, monkeypatch):
    hub = Hub(monkeypatch, tmp_path / "copy")
    (source,) = resolve((Source(path="owner/name", split="dev"),))
    assert (source.kind, source.name, texts(source)) == ("arrow", "name", ["only 0", "only 1", "only 2"])
    assert hub.asked == [("owner/name", "dev", False)]


def test_a_name_on_the_hub_is_streamed_by_shards(tmp_path, monkeypatch):
    hub = Hub(monkeypatch, tmp_path / "copy")
    (source,) = resolve("owner/name", streaming=True)
    assert [str(path) for path in source.files] == [f"owner/name/train/0000{n}-of-00002" for n in range(2)]
    assert texts(source) == ["only 0", "only 1", "only 2"]
    (record,) = read_file(source.files[0], "hub", after=1)
    assert (str(record.place), record.value) == ("owner/name/train/00000-of-00002: row 2", {"text": "only 1"})
    assert {streaming for _, _, streaming in hub.asked} == {True}


def test_what_is_no_path_and_not_on_the_hub_is_refused(tmp_path, monkeypatch):
    Hub(monkeypatch, tmp_path / "copy")
    with pytest.raises(DataError, match=r"no such path, and not reachable as a Hub .* Couldn't reach") as caught:
        resolve("owner/other")
    assert "second line" not in str(caught.value)
    with pytest.raises(DataError, match=r"plain name such as train; got 'train.:10%.'. Cut with max_records"):
        resolve((Source(path="owner/name", split="train[:10%]"),))


@pytest.mark.parametrize(
    ("path", "name"),
    [("data/chats.jsonl.gz", "chats"), ("data/chats-*.jsonl", "chats"), ("data/v1.2.txt", "v1.2"), ("*.json", "data")],
)
def test_a_source_is_called_by_its_path_without_endings(path, name):
    assert unique_name(short_name(path), []) == name
    assert unique_name(short_name(path), [name]) == f"{name}-2"
