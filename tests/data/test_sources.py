import pytest

from freight.config.schema import DataConfig, Source
from freight.data.sources import resolve_sources
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
        ("owner/name", "not supported: download it first"),
        ("*.parquet", "no file matches"),
        ("empty", "no data files"),
        ("mixed", r"several kinds: text \(a.txt\), jsonl \(b.jsonl\); choose with a glob"),
        ("mixed/a.txt.gz", "compressed files are not supported; decompress it first"),
        ("a.csv", "unknown kind '.csv'; expected one of .jsonl"),
        ("arrow", "save it with to_parquet"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, entry, words):
    for name in ("mixed", "empty", "arrow"):
        (tmp_path / name).mkdir()
    for name in ("mixed/a.txt", "mixed/b.jsonl", "a.csv", "arrow/state.json"):
        (tmp_path / name).write_text("")
    if entry.endswith(".gz"):
        (tmp_path / entry).write_text("")
    with pytest.raises(DataError, match=words):
        resolve(str(tmp_path / entry))


def test_an_empty_match_shows_the_folder(tmp_path):
    (tmp_path / "train.json").write_text("")
    with pytest.raises(DataError, match=r"'.*\*.jsonl'; .* has train.json"):
        resolve(f"{tmp_path}/*.jsonl")


@pytest.mark.parametrize(("option", "words"), [({"weight": 0.5}, "weights"), ({"split": "test"}, "split 'test'")])
def test_options_without_effect_are_refused(tmp_path, option, words):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match=words):
        resolve((Source(path=str(tmp_path / "a.jsonl"), **option),))
