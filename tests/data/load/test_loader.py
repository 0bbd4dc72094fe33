import json
import threading
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import freight.data.pack.document_rows as rows_module
from freight.data.documents import InMemoryDocuments, make_document
from freight.data.load.loader import StepLoader, evaluation_batches
from freight.data.pack.document_rows import DocumentRows
from freight.data.pack.file_rows import FileRows
from freight.data.pack.packed_file import PackedFile
from freight.data.pack.packed_writer import packed_metadata, write_packed
from freight.data.pack.packing import pack
from freight.data.pack.rows import rows_of as rows_of_plan
from freight.errors import CheckpointError, ConfigError, DataError

PACK_SIZE = 8


def documents(count, *, metadata=None):
    """Documents of 1 to 8 tokens; every id names its document."""
    lengths = [1 + 5 * i % PACK_SIZE for i in range(count)]
    return InMemoryDocuments([make_document([i + 1] * n, [True] * n) for i, n in enumerate(lengths)], metadata)


def rows_of(count=10, algorithm="none", seed=0, **options):
    return DocumentRows(documents(count), algorithm, PACK_SIZE, seed, **options)


def loader_of(rows, **options):
    options = {"rows_per_step": 2, "micro_batch_tokens": PACK_SIZE, "epochs": 3, **options}
    return StepLoader(rows, **options)


def ids_of(step):
    """Documents of a step, in order."""
    return [d for batch in step.microbatches for d in batch.documents if d >= 0]


def all_tensors(step):
    return [(b.input_ids.tolist(), b.labels.tolist(), b.cu_seqlens, b.step, b.microbatch) for b in step.microbatches]


def test_every_epoch_has_every_document_once_in_another_order():
    steps = list(loader_of(rows_of()))
    epochs = [[d for step in steps[5 * e : 5 * e + 5] for d in ids_of(step)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [step.epoch for step in steps[4::5]] == [1.0, 2.0, 3.0]


def test_without_shuffle_the_order_is_that_of_the_data():
    steps = list(loader_of(rows_of(shuffle=False), epochs=2))
    assert [d for step in steps for d in ids_of(step)] == 2 * list(range(10))


@pytest.mark.parametrize("stop", [3, 5, 7])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("micro", [PACK_SIZE, 2 * PACK_SIZE])
@pytest.mark.parametrize("algorithm", ["none", "first_fit_shuffle"])
def test_resume_neither_repeats_nor_skips(stop, workers, micro, algorithm):
    options = {"micro_batch_tokens": micro, "num_workers": workers, "seed": 5}
    straight = [all_tensors(step) for step in loader_of(rows_of(algorithm=algorithm), **options)]
    first = loader_of(rows_of(algorithm=algorithm), **options)
    joined = [all_tensors(step) for step in islice(first, stop)]
    second = loader_of(rows_of(algorithm=algorithm), **{**options, "num_workers": 2 - workers})
    assert second.load_state_dict(first.state_dict()) == []
    joined += [all_tensors(step) for step in second]
    assert joined == straight
    assert second.state_dict()["step"] == second.total_steps == len(straight)


@settings(max_examples=35)
@given(st.data())
def test_order_is_the_same_for_any_workers_ranks_and_stops(data):
    count = data.draw(st.integers(1, 30))
    options = {
        "rows_per_step": data.draw(st.integers(1, 7)),
        "micro_batch_tokens": PACK_SIZE * data.draw(st.integers(1, 3)),
        "seed": 1,
        **data.draw(st.sampled_from([{"epochs": 3}, {"epochs": 1.5}, {"epochs": None, "steps": 9}])),
    }
    source = {
        "algorithm": data.draw(st.sampled_from(["none", "first_fit_shuffle", "split", "best_fit_decreasing"])),
        "window_documents": data.draw(st.sampled_from([None, 4])),
        "shuffle": data.draw(st.booleans()),
    }
    straight = [sorted(ids_of(step)) for step in loader_of(rows_of(count, **source), **options)]

    legs = data.draw(
        st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([0, 1, 3]), st.integers(1, 9)), max_size=4)
    )
    joined, state = [], None
    for ranks, workers, stop in [*legs, (1, 0, None)]:
        loaders = [
            loader_of(rows_of(count, **source), **options, data_ranks=ranks, rank=rank, num_workers=workers)
            for rank in range(ranks)
        ]
        for loader in loaders:
            if state:
                loader.load_state_dict(state)
        for steps in islice(zip(*loaders, strict=True), stop):
            assert len({len(step.microbatches) for step in steps}) == 1
            assert {step.global_targets for step in steps} == {sum(step.num_targets for step in steps)}
            joined.append(sorted(d for step in steps for d in ids_of(step)))
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert joined == straight


@pytest.mark.parametrize("files", [1, 3, 8])
def test_another_world_size_sees_the_same_samples(files):
    # 8 samples in some files, global batch 4: what a step sees does not depend on who sees it
    spread = documents(8, metadata={"sources": [{"path": f"{i}.jsonl", "hash": "00"} for i in range(files)]})

    def steps(ranks, state=None):
        loaders = [
            loader_of(DocumentRows(spread, "none", PACK_SIZE), rows_per_step=4, data_ranks=ranks, rank=r, num_workers=2)
            for r in range(ranks)
        ]
        for loader in loaders:
            if state:
                loader.load_state_dict(state)
        for together in zip(*loaders, strict=True):
            yield sorted(d for step in together for d in ids_of(step)), loaders[0].state_dict()

    straight = [seen for seen, _ in steps(2)]
    assert [sorted(a + b) for a, b in zip(straight[::2], straight[1::2], strict=True)] == 3 * [list(range(8))]
    for stop in (1, 2):
        state = [state for _, state in steps(2)][stop - 1]
        for ranks in (1, 4):
            assert [seen for seen, _ in steps(ranks, state)] == straight[stop:]


def test_samples_belong_to_ranks_by_position():
    straight = [ids_of(step) for step in loader_of(rows_of(), rows_per_step=4)]
    for rank in range(2):
        mine = [ids_of(step) for step in loader_of(rows_of(), rows_per_step=4, data_ranks=2, rank=rank)]
        assert mine == [step[rank::2] for step in straight]


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 3), (True, 2)])
def test_a_short_last_step_is_a_step(drop_last, steps):
    # five microbatches, two per step
    loader = loader_of(rows_of(5), epochs=1, drop_last=drop_last)
    assert loader.total_steps == loader.steps_per_epoch == steps
    assert [len(step.microbatches) for step in loader] == [2, 2, 1][:steps]


def test_fewer_rows_than_a_step():
    (step,) = loader_of(rows_of(3), rows_per_step=4, epochs=1)
    assert len(step.microbatches) == 3
    (step,) = loader_of(rows_of(3), rows_per_step=4, micro_batch_tokens=4 * PACK_SIZE, epochs=1)
    assert step.microbatches[0].tokens == 4 * PACK_SIZE
    assert sorted(ids_of(step)) == [0, 1, 2]
    assert step.num_targets == sum(int((b.labels >= 0).sum()) for b in step.microbatches)
    with pytest.raises(ConfigError, match="0 steps per epoch: 3 rows, global batch 4"):
        loader_of(rows_of(3), rows_per_step=4, epochs=1, drop_last=True)
    with pytest.raises(ConfigError, match="0 steps per epoch"):
        loader_of(rows_of(3), rows_per_step=4, epochs=None, steps=9, drop_last=True)


def test_a_rank_without_samples_gets_fillers():
    loaders = [loader_of(rows_of(3), rows_per_step=4, epochs=1, data_ranks=4, rank=r) for r in range(4)]
    steps = [list(loader) for loader in loaders]
    assert [len(s) for s in steps] == [1, 1, 1, 1]
    assert [ids_of(s[0]) == [] for s in steps] == [False, False, False, True]
    assert all(len(s[0].microbatches) == 1 for s in steps)
    assert steps[3][0].num_targets == 0
    assert steps[3][0].microbatches[0].labels.tolist() == [-100] * PACK_SIZE


def test_uneven_ranks_take_equally_many_steps():
    # 2 ranks, 5 samples, one per rank and step
    loaders = [loader_of(rows_of(5), epochs=1, data_ranks=2, rank=r) for r in range(2)]
    assert [len(list(loader)) for loader in loaders] == [3, 3]


def test_with_steps_the_stream_runs_into_the_next_epoch():
    steps = [ids_of(step) for step in loader_of(rows_of(5), epochs=None, steps=5)]
    assert [len(step) for step in steps] == [2] * 5
    seen = [d for step in steps for d in step]
    assert sorted(seen[:5]) == sorted(seen[5:]) == list(range(5))


def test_with_steps_and_drop_last_no_step_mixes_epochs():
    steps = [ids_of(step) for step in loader_of(rows_of(5, shuffle=False), epochs=None, steps=4, drop_last=True)]
    assert steps == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_a_fraction_of_an_epoch():
    loader = loader_of(rows_of(10), epochs=1.5)
    assert loader.total_steps == 5 + 3
    assert sum(len(ids_of(step)) for step in loader) == 15


@pytest.mark.parametrize("tokens", [1, 12, 20])
def test_a_microbatch_is_whole_rows(tokens):
    near = {1: "Use 8.", 12: "Use 8 or 16.", 20: "Use 16 or 24."}[tokens]
    with pytest.raises(ConfigError, match=f"multiple of pack_size 8; got {tokens}. {near}"):
        loader_of(rows_of(), micro_batch_tokens=tokens)


def test_every_microbatch_has_the_same_number_of_tokens():
    for micro in (PACK_SIZE, 3 * PACK_SIZE):
        loader = loader_of(rows_of(11, algorithm="first_fit_shuffle"), rows_per_step=4, micro_batch_tokens=micro)
        assert {batch.tokens for step in loader for batch in step.microbatches} == {micro}


def test_without_row_padding_no_token_is_wasted():
    for step in loader_of(rows_of(11, algorithm="first_fit_shuffle"), pad_rows=False):
        assert step.efficiency == 1.0


def test_numbers_of_a_step_are_those_of_its_batches():
    for step in loader_of(rows_of(11, algorithm="split"), rows_per_step=3):
        assert step.num_targets == sum(int((b.labels != -100).sum()) for b in step.microbatches)
        assert step.num_tokens == sum(b.real_tokens for b in step.microbatches)
        assert step.num_documents == sum(len(b.spans) for b in step.microbatches)
        assert [b.microbatch for b in step.microbatches] == list(range(len(step.microbatches)))


def test_windows_are_packed_anew_each_epoch_and_lose_nothing():
    loader = loader_of(rows_of(23, algorithm="first_fit_shuffle", window_documents=5), rows_per_step=3)
    steps = list(loader)
    by_epoch = [[], [], []]
    for step in steps:
        by_epoch[int(step.epoch - 1e-9)] += ids_of(step)
    assert [sorted(epoch) for epoch in by_epoch] == 3 * [list(range(23))]
    assert len(steps) == loader.total_steps


def test_a_worker_that_raises_raises_here():
    class Broken(DocumentRows):
        def row(self, epoch, window, number):
            if number == 6:
                raise DataError("train.jsonl:3: bad line 3")
            return super().row(epoch, window, number)

    for workers in (0, 2):
        loader = loader_of(Broken(documents(10), "none", PACK_SIZE, shuffle=False), num_workers=workers)
        seen = []
        with pytest.raises(DataError, match="bad line 3"):
            seen.extend(iter_steps(loader))
        assert len(seen) <= 3
        assert loader.state_dict()["step"] == 3, "the steps before it were handed out, and no more"


def iter_steps(loader):
    yield from loader


def test_workers_work_ahead_and_end_with_the_loop():
    built = []

    class Watched(DocumentRows):
        def row(self, epoch, window, number):
            built.append(number)
            return super().row(epoch, window, number)

    steps = iter(loader_of(Watched(documents(10), "none", PACK_SIZE), num_workers=1, prefetch_batches=2))
    next(steps)
    steps.close()
    assert 2 <= len(built) <= 8, "the present step and at most the next ones"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("freight-loader")]


def test_state_is_small_and_plain():
    loader = loader_of(rows_of(10))
    list(loader)
    assert len(json.dumps(loader.state_dict())) < 700
    assert loader.state_dict()["consumed_samples"] == 30
    assert loader.state_dict()["consumed_tokens"] == 3 * int(documents(10).lengths.sum())


def test_changed_data_is_refused_and_named():
    def over(hash_, count=10, **options):
        return loader_of(DocumentRows(documents(count, metadata=sources(hash_)), "none", PACK_SIZE, **options))

    def sources(hash_):
        return {"sources": [{"path": "train.jsonl", "hash": hash_, "records": 10}]}

    loader = over("3f00")
    steps = iter(loader)
    for _ in range(7):
        next(steps)
    state = loader.state_dict()
    with pytest.raises(DataError, match=r"data changed since step 7: train.jsonl \(hash 3f00 -> 9a00\)"):
        over("9a00", 11).load_state_dict(state)
    with pytest.raises(DataError, match=r"data\.seed 0 -> 4"):
        over("3f00", seed=4).load_state_dict(state)
    with pytest.raises(DataError, match="packing algorithm none -> split"):
        loader_of(DocumentRows(documents(10, metadata=sources("3f00")), "split", PACK_SIZE)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="version 2"):
        over("3f00").load_state_dict({**state, "version": 2})

    again = over("9a00", 11)
    assert "epoch 1 restarts" in again.load_state_dict(state, allow_changed=True)[0]
    assert sorted(d for step in islice(again, 6) for d in ids_of(step)) == list(range(11))


def test_another_global_batch_continues_where_the_rows_stopped():
    loader = loader_of(rows_of(10))
    seen = [d for step in islice(loader, 2) for d in ids_of(step)]
    larger = loader_of(rows_of(10), rows_per_step=3)
    (notice,) = larger.load_state_dict(loader.state_dict())
    assert "from 2 to 3 rows; continues after 4 rows" in notice
    seen += [d for step in islice(larger, 2) for d in ids_of(step)]
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["none", "first_fit_decreasing", "split"])
def test_evaluation_sees_every_document_once(ranks, algorithm):
    source = rows_of(11, algorithm=algorithm, shuffle=False)
    batches = [list(evaluation_batches(source, 2 * PACK_SIZE, data_ranks=ranks, rank=r)) for r in range(ranks)]
    assert len({len(mine) for mine in batches}) == 1
    tokens = np.zeros(11, int)
    for batch in (batch for mine in batches for batch in mine):
        for document, length in zip(batch.documents, batch.lengths, strict=True):
            tokens[document] += length if document >= 0 else 0
    assert tokens.tolist() == documents(11).lengths.tolist()


def test_a_packed_file_feeds_the_same_rows_in_the_order_of_its_seed(tmp_path):
    made = documents(20)
    rows = pack(made.lengths, "first_fit_shuffle", PACK_SIZE, 3)
    write_packed(tmp_path / "p.arrow", rows_of_plan(rows, made), packed_metadata(rows, made, 3))
    file = PackedFile(tmp_path / "p.arrow")
    epochs = [[], []]
    for step in loader_of(FileRows(file, seed=1), epochs=2, rows_per_step=1):
        epochs[int(step.epoch - 1e-9)].append(tuple(ids_of(step)))
    plan = [tuple(d for d, _, _ in rows.row(row)) for row in range(len(rows))]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(plan)
    assert epochs[0] != epochs[1]
    unshuffled = loader_of(FileRows(file, shuffle=False), epochs=1, rows_per_step=1)
    assert [tuple(ids_of(step)) for step in unshuffled] == plan


def test_no_documents():
    with pytest.raises(DataError, match=r"0 documents to pack \(skipped: no_target 3\)"):
        DocumentRows(InMemoryDocuments([], {"skipped": {"no_target": 3}}), "none", PACK_SIZE)


def test_the_next_window_is_packed_while_this_one_is_read(monkeypatch):
    packed_by = {}
    real = rows_module.pack

    def noting(*arguments, epoch, window, **options):
        packed_by[epoch, window] = threading.current_thread().name
        return real(*arguments, epoch=epoch, window=window, **options)

    def all_rows(source):
        names = [(e, w, n) for e in range(2) for w in range(3) for n in range(source.rows_in(e, w))]
        return [source.row(*name).ids.tolist() for name in names]

    plain = all_rows(rows_of(30, window_documents=10))
    monkeypatch.setattr(rows_module, "pack", noting)
    monkeypatch.setattr(rows_module, "WORTH_PACKING_AHEAD", 1)
    assert all_rows(rows_of(30, window_documents=10)) == plain
    first, *later = (packed_by[epoch, window].startswith("freight-packer") for epoch in range(2) for window in range(3))
    assert not first
    assert all(later)
