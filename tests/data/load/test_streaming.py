import gzip
import json
import threading
from collections import Counter
from itertools import islice

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freight.config.schema import DataConfig
from freight.data.load.build import open_rows
from freight.data.load.loader import StepLoader, joined_state
from freight.data.load.shard_stream import Lane, Position
from freight.data.read.records import Place, RawRecord, Reason, RecordFault
from freight.data.read.rejects import Rejects
from freight.errors import DataError
from tests.data.small_tokenizer import small_tokenizer

TOKENIZER = small_tokenizer()
PACK_SIZE = 16


def write_shards(folder, counts, *, packed=False, name="s"):
    """One text per record, which names its shard and line."""
    folder.mkdir(exist_ok=True)
    for shard, count in enumerate(counts):
        lines = "".join(json.dumps({"text": f"{name}{shard}.{line}"}) + "\n" for line in range(count)).encode()
        path = folder / f"{name}{shard}.jsonl"
        path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(lines)) if packed else path.write_bytes(lines)
    return folder


def expected(counts, name="s"):
    return sorted(f"{name}{shard}.{line}" for shard, count in enumerate(counts) for line in range(count))


def config_of(train, **data):
    sources = tuple({"path": str(path)} if not isinstance(path, dict) else path for path in train)
    data = {"sequence_length": PACK_SIZE, "cache_dir": None, "streaming": True, "shuffle_buffer": 4, **data}
    return DataConfig.model_validate({"train": sources, **data})


def rows_of(config, *, data_ranks=1, rank=0, seed=0, folder=None):
    return open_rows(
        config, seed, "train", TOKENIZER, vocab_size=512, rejects_dir=folder, data_ranks=data_ranks, rank=rank
    )


def loader_of(config, *, data_ranks=1, rank=0, **options):
    rows = rows_of(config, data_ranks=data_ranks, rank=rank)
    options = {"rows_per_step": 2, "micro_batch_tokens": PACK_SIZE, "steps": 12, **options}
    return StepLoader(rows, data_ranks=data_ranks, rank=rank, **options)


def texts(step):
    """Of every document, in order."""
    found = []
    for batch in step.microbatches:
        start = 0
        for size, length in zip(
            (b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)), batch.lengths, strict=True
        ):
            if length:
                ids = batch.input_ids[start : start + length].tolist()
                found.append(TOKENIZER.decode(ids).removeprefix("<bos>").removesuffix("<eos>"))
            start += size
    return found


def tensors(step):
    return [(b.input_ids.tolist(), b.labels.tolist(), b.cu_seqlens, b.microbatch) for b in step.microbatches]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_every_pass_has_every_document_once(tmp_path, packed, shuffle):
    counts = [5, 3, 4]
    write_shards(tmp_path / "d", counts, packed=packed)
    loader = loader_of(config_of([tmp_path / "d"], shuffle=shuffle), rows_per_step=3, steps=8)
    stream = [text for step in loader for text in texts(step)]
    assert len(stream) == 24
    assert sorted(stream[:12]) == sorted(stream[12:]) == expected(counts)
    if shuffle:
        assert stream[:12] != stream[12:] != expected(counts)
    else:
        assert stream[:12] == stream[12:] == expected(counts)
    assert loader.state_dict()["consumed_samples"] == 24


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_stop_anywhere_changes_nothing(tmp_path, data):
    counts = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    folder = tmp_path / "-".join(map(str, counts))
    write_shards(folder, counts)
    config = config_of(
        [folder],
        shuffle_buffer=data.draw(st.integers(1, 9)),
        shuffle=data.draw(st.booleans()),
        packing=data.draw(st.sampled_from([None, {"algorithm": "split"}, {"algorithm": "first_fit_shuffle"}])),
        sequence_length=data.draw(st.sampled_from([3, PACK_SIZE])),
        truncation="split",
    ).model_copy()
    if config.packing is not None:
        config = config.model_copy(update={"packing": config.packing.model_copy(update={"pack_size": PACK_SIZE})})
    options = {"micro_batch_tokens": config.packing.pack_size if config.packing else config.sequence_length}
    straight = [tensors(step) for step in loader_of(config, **options)]
    joined, state = [], None
    for stop in [*data.draw(st.lists(st.integers(1, 6), max_size=3)), None]:
        loader = loader_of(config, num_workers=data.draw(st.sampled_from([0, 1, 3])), **options)
        if state is not None:
            assert loader.load_state_dict(json.loads(json.dumps(state))) == []
        joined += [tensors(step) for step in islice(loader, stop)]
        state = loader.state_dict()
    assert joined == straight
    assert len(json.dumps(state)) < 900


def test_a_restart_reads_from_the_buffer_on(tmp_path, monkeypatch):
    write_shards(tmp_path / "d", [40, 40])
    config = config_of([tmp_path / "d"], shuffle=False, shuffle_buffer=10)
    first = loader_of(config, rows_per_step=5, steps=14)
    list(islice(first, 13))
    asked = []
    plain = Lane.documents
    monkeypatch.setattr(Lane, "documents", lambda self, position: asked.append(position) or plain(self, position))
    second = loader_of(config, rows_per_step=5, steps=14)
    second.load_state_dict(first.state_dict())
    assert [texts(step) for step in second] == [[f"s1.{line}" for line in range(25, 30)]]
    assert asked[0][:4] == (0, 1, 20, 0), "line 20 of the second shard is the last one before the buffer"


def test_a_record_of_several_documents_may_be_cut_by_a_buffer(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": letter * 9}) + "\n" for letter in "abc"))
    config = config_of([tmp_path / "a.jsonl"], sequence_length=4, shuffle=False, shuffle_buffer=2)
    loader = loader_of(config, rows_per_step=1, micro_batch_tokens=4, steps=9)
    assert [texts(step)[0] for step in loader] == [p for x in "abc" for p in (3 * x, 4 * x, 2 * x)]
    loader = loader_of(config, rows_per_step=1, micro_batch_tokens=4, steps=9)
    next(iter(loader))
    (mark,) = rows_mark(loader, 1)
    assert mark[:4] == [0, 0, -1, 2]


def rows_mark(loader, window):
    loader._rows.rows_in(0, window)
    return loader._rows.mark(window)["lanes"]


def test_shards_are_dealt_to_ranks_and_all_ranks_resume_from_one_state(tmp_path):
    counts = [4, 4, 4, 4]
    write_shards(tmp_path / "d", counts)
    config = config_of([tmp_path / "d"])

    def run(state, stop, workers=2):
        loaders = [
            loader_of(config, data_ranks=2, rank=rank, rows_per_step=4, steps=8, num_workers=workers)
            for rank in range(2)
        ]
        for loader in loaders:
            if state:
                loader.load_state_dict(state)
        steps = [tuple(map(texts, pair)) for pair in islice(zip(*loaders, strict=True), stop)]
        return steps, json.loads(json.dumps(joined_state([loader.state_dict() for loader in loaders])))

    straight, _ = run(None, None)
    for half in (straight[:4], straight[4:]):
        assert sorted(text for pair in half for mine in pair for text in mine) == expected(counts)
    for stop in range(1, 8):
        begun, state = run(None, stop)
        ended, _ = run(state, None, workers=0)
        assert begun + ended == straight
    other = loader_of(config, data_ranks=4, rank=3, rows_per_step=4, steps=8)
    with pytest.raises(DataError, match=r"dealt to 2 data ranks, now there are 4.* Resume on 2 data ranks"):
        other.load_state_dict(state)


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_ranks_resume_each_at_its_own_place(tmp_path, stop):
    write_shards(tmp_path / "d", [1, 5, 2, 7])
    config = config_of([tmp_path / "d"], packing={"algorithm": "first_fit_shuffle"}, shuffle_buffer=3)

    def loaders():
        return [loader_of(config, data_ranks=2, rank=rank, rows_per_step=3, steps=8) for rank in range(2)]

    straight = [[tensors(step) for step in loader] for loader in loaders()]
    first = loaders()
    begun = [[tensors(step) for step in islice(loader, stop)] for loader in first]
    state = joined_state([loader.state_dict() for loader in first])
    assert stop == 1 or state["ranks"][0]["mark"] != state["ranks"][1]["mark"]
    for loader, before, whole in zip(loaders(), begun, straight, strict=True):
        loader.load_state_dict(state)
        assert before + [tensors(step) for step in loader] == whole


def test_ranks_without_a_row_of_a_step_join_it(tmp_path):
    write_shards(tmp_path / "d", [4, 4, 4])
    loaders = [
        loader_of(config_of([tmp_path / "d"]), data_ranks=3, rank=rank, rows_per_step=2, steps=2) for rank in range(3)
    ]
    steps = [list(loader) for loader in loaders]
    assert [[len(step.microbatches) for step in mine] for mine in steps] == [[1, 1]] * 3
    assert [[step.num_documents for step in mine] for mine in steps] == [[1, 1], [1, 1], [0, 0]]
    assert {step.global_targets for mine in steps for step in mine} == {None}


def test_fewer_shards_than_ranks_are_refused(tmp_path):
    write_shards(tmp_path / "d", [4, 4, 4])
    with pytest.raises(DataError, match=r"3 shards for 4 data ranks"):
        rows_of(config_of([tmp_path / "d"]), data_ranks=4, rank=0)


@pytest.mark.parametrize("stop", [None, 7])
def test_sources_are_mixed_by_weight(tmp_path, stop):
    write_shards(tmp_path / "a", [3, 2], name="a")
    write_shards(tmp_path / "b", [10], name="b")
    sources = [{"path": str(tmp_path / "a"), "weight": 3}, {"path": str(tmp_path / "b"), "weight": 1}]
    config = config_of(sources, shuffle=False, shuffle_buffer=5)
    loader = loader_of(config, rows_per_step=4, steps=20)
    steps = [texts(step) for step in islice(loader, stop)]
    if stop:
        again = loader_of(config, rows_per_step=4, steps=20)
        again.load_state_dict(loader.state_dict())
        steps += [texts(step) for step in again]
    counts = [Counter(text[0] for text in step) for step in steps]
    assert counts == [Counter(a=3, b=1)] * 20
    stream = [text for step in steps for text in step]
    assert [text for text in stream if text[0] == "a"] == 12 * expected([3, 2], "a")
    assert sorted(text for text in stream if text[0] == "b") == sorted(2 * expected([10], "b"))


def test_the_source_of_a_document_is_known(tmp_path):
    write_shards(tmp_path / "a", [6], name="a")
    write_shards(tmp_path / "b", [6], name="b")
    rows = rows_of(config_of([tmp_path / "a", tmp_path / "b"], shuffle=False))
    assert [rows.source_of(int(rows.row(0, w, 0).documents[0])) for w in range(3)] == ["a", "a", "b"]


def test_a_bad_record_names_its_place_in_whatever_thread_it_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x"}) + "\n" for _ in range(300)) + '{"text": 5}\n')
    for workers in (0, 2):
        loader = loader_of(config_of([path], shuffle=False), steps=400, num_workers=workers)
        with pytest.raises(DataError, match=r"a.jsonl:301: text: expected"):
            list(loader)


def test_skipped_records_are_listed_and_too_many_end_the_run(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": 5}\n{"text": "b"}\n{"text": "c"}\n')
    lenient = config_of([path], shuffle=False, on_bad_record="skip", max_skipped_fraction=0.25)
    rows = rows_of(lenient, folder=tmp_path / "run")
    loader = StepLoader(rows, rows_per_step=3, micro_batch_tokens=PACK_SIZE, steps=2)
    assert [texts(step) for step in loader] == [["a", "b", "c"]] * 2
    (reject,) = (tmp_path / "run" / "rejects-a.jsonl").read_text().splitlines()
    assert json.loads(reject)["line"] == 2
    strict = config_of([path], shuffle=False, on_bad_record="skip", max_skipped_fraction=0.2)
    with pytest.raises(DataError, match="1 of 4 records are bad"):
        list(loader_of(strict, rows_per_step=3))


def test_a_skipped_record_is_listed_at_once(tmp_path):
    """Not only when its pass ends: a run may end before."""
    rejects = Rejects("a", tmp_path, skip=True)
    record = RawRecord(Place(tmp_path / "a.jsonl", "jsonl", 6), {"text": None}, None, None, 0)
    rejects.reject(record, RecordFault(Reason.WRONG_TYPE, "text", "a text is expected"))
    (line,) = (tmp_path / "rejects-a.jsonl").read_text().splitlines()
    assert json.loads(line)["line"] == 6
    rejects.close()


def test_a_resumed_pass_is_not_judged_by_its_rest(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n}"}) + "\n" for n in range(9)) + '{"text": 5}\n')
    config = config_of([path], shuffle=False, on_bad_record="skip", max_skipped_fraction=0.1, shuffle_buffer=9)
    loader = loader_of(config, rows_per_step=3, steps=5)
    straight = [texts(step) for step in loader]
    first = loader_of(config, rows_per_step=3, steps=5)
    list(islice(first, 4))
    second = loader_of(config, rows_per_step=3, steps=5)
    second.load_state_dict(first.state_dict())
    assert [texts(step) for step in second] == straight[4:]
    rows = rows_of(config)
    rows.return_to(1, {"lanes": [list(Position(0, 0, 9))]})
    assert rows.rows_in(0, 1) == 9, "the last line alone is bad"


def test_documents_without_end_are_needed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="0 usable records"):
        list(loader_of(config_of([path], on_bad_record="skip", max_skipped_fraction=1)))
    path.write_text("\n")
    with pytest.raises(DataError, match=r"a.jsonl: 0 records; the source is empty"):
        rows_of(config_of([path]))
    path.write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match="none of the first 1 records has a column 'body'"):
        rows_of(config_of([path], fields={"system": "body"}))


def test_what_is_noticed_in_the_first_records_is_told(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "id": 1}\n')
    assert rows_of(config_of([path])).metadata["notices"] == [
        f"{path}: format text (detected)",
        f"{path}: keys not used in the first 1 records: id (1)",
    ]


def test_changed_shards_are_refused(tmp_path):
    write_shards(tmp_path / "d", [4, 4])
    config = config_of([tmp_path / "d"])
    loader = loader_of(config)
    next(iter(loader))
    state = loader.state_dict()
    write_shards(tmp_path / "d", [4, 5])
    with pytest.raises(DataError, match="data changed since step 1"):
        loader_of(config).load_state_dict(state)
    changed = loader_of(config)
    assert "epoch 0 restarts" in changed.load_state_dict(state, allow_changed=True)[0]
    assert len(list(changed)) == 11


def test_the_hub_is_read_shard_by_shard(monkeypatch):
    records = datasets.Dataset.from_list([{"text": f"h{n}"} for n in range(6)])
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: records.to_iterable_dataset(num_shards=3))
    config = config_of([{"path": "owner/name"}], shuffle_buffer=6)
    loader = loader_of(config, rows_per_step=3, steps=4)
    stream = [text for step in loader for text in texts(step)]
    assert sorted(stream[:6]) == sorted(stream[6:]) == [f"h{n}" for n in range(6)]


def test_passes_are_counted(tmp_path):
    write_shards(tmp_path / "d", [8, 8])
    epochs = [step.epoch for step in loader_of(config_of([tmp_path / "d"]), rows_per_step=4, steps=8)]
    assert epochs == pytest.approx([0.25 * n for n in range(1, 9)], abs=0.02)


def test_nothing_is_left_running(tmp_path):
    write_shards(tmp_path / "d", [4])
    list(loader_of(config_of([tmp_path / "d"]), num_workers=2))
    assert not [
        thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()
    ]
