"""Rules for sources of records: weights, streaming, and names that are no local path."""

from __future__ import annotations

import pytest

from freight.config.checks import is_hub_name
from freight.config.load import load_config
from freight.errors import ConfigError
from tests.config.example import example, put, write

STREAM = {"data.streaming": True}


def faults_of(folder, changes) -> list[str]:
    raw = example(folder)
    for key, value in changes.items():
        put(raw, key, value)
    try:
        load_config(write(folder, raw))
    except ConfigError as error:
        return list(error.faults)
    return []


def sources(folder, *weights):
    path = example(folder)["data"]["train"]
    return [{"path": path} | ({"weight": weight} if weight else {}) for weight in weights]


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ((0.5, None), "`data.train[1]` has no `weight`, others have. Give every source one"),
        ((0.5,), "`data.train[0].weight` has no effect on the only source. Remove it."),
        ((0.5, -1), "`data.train[1].weight` must be a number above 0, or null; got -1"),
    ],
)
def test_weights_are_for_all_of_several_sources(tmp_path, weights, sentence):
    found = faults_of(tmp_path, {"data.train": sources(tmp_path, *weights)})
    assert any(sentence in fault for fault in found), found


def test_weights_and_sources_without_any_are_good(tmp_path):
    assert faults_of(tmp_path, {"data.train": sources(tmp_path, 0.5, 2)}) == []
    assert faults_of(tmp_path, {"data.train": sources(tmp_path, None, None)}) == []


def test_validation_is_not_weighted(tmp_path):
    (fault,) = faults_of(tmp_path, {"data.validation": sources(tmp_path, 1)})
    assert fault.startswith("`data.validation[0].weight` has no effect: validation reads every record once.")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data.shuffle_buffer": 100}, "`data.shuffle_buffer` has no effect without `data.streaming`"),
        ({**STREAM, "train.steps": None, "train.epochs": 2}, "`train.epochs` 2 needs the number of documents"),
        ({**STREAM, "data.drop_last": True}, "`data.drop_last` has no effect with `data.streaming`"),
        ({**STREAM, "data.cache_dir": "c"}, "`data.cache_dir` has no effect with `data.streaming`"),
        ({**STREAM, "data.packing.window_documents": 5}, "Set `data.shuffle_buffer` instead."),
        ({**STREAM, "data.packing.file": "F", "data.format": "packed"}, "`data.streaming`"),
        (
            {**STREAM, "train.global_batch_size": None, "train.global_batch_documents": 8},
            "`train.global_batch_documents` 8 needs the documents per row",
        ),
    ],
)
def test_what_a_stream_cannot_do_is_one_sentence(tmp_path, changes, sentence):
    found = faults_of(tmp_path, changes)
    assert any(sentence in fault for fault in found), found


def test_a_stream_is_good(tmp_path):
    assert faults_of(tmp_path, {**STREAM, "data.shuffle_buffer": 100, "data.cache_dir": None}) == []


def test_a_stream_takes_whole_sources(tmp_path):
    path = example(tmp_path)["data"]["train"]
    (fault,) = faults_of(tmp_path, {**STREAM, "data.train": [{"path": path, "max_records": 3}]})
    assert "max_records` has no effect with `data.streaming`" in fault


def test_names_on_the_hub_need_no_local_path(tmp_path):
    assert faults_of(tmp_path, {"data.train": "owner/name"}) == []
    (fault,) = faults_of(tmp_path, {"data.train": "folder/train.jsonl"})
    assert '`data.train` "folder/train.jsonl" does not exist' in fault
    (fault,) = faults_of(tmp_path, {"data.tokenizer": "owner/name"})
    assert '`data.tokenizer` "owner/name" does not exist' in fault


@pytest.mark.parametrize(
    "path", ["name", "a/b/c", "./name", "/owner/name", "data/x.jsonl.gz", "data/x.CSV", "o/", "~/n"]
)
def test_what_is_surely_a_path_is_no_name(path):
    assert not is_hub_name(path)


def test_every_kind_of_name_is_one():
    assert all(map(is_hub_name, ["owner/name", "HuggingFaceFW/fineweb-edu", "o/n.v1_2"]))
