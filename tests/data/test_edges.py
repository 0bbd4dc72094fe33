"""From files to steps: what happens where data and steps do not fit each other; order never depends on who reads."""

import json
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freight.config.schema import DataConfig
from freight.data.load.build import open_rows
from freight.data.load.loader import StepLoader, evaluation_batches
from freight.data.read.jsonl import read_jsonl
from freight.errors import ConfigError, DataError
from tests.data.small_tokenizer import small_tokenizer

TOKENIZER = small_tokenizer()
SIZE = 16


def write(folder, count, files=1):
    """`count` texts of different lengths, spread over some files."""
    folder.mkdir(exist_ok=True)
    for file in range(files):
        lines = (json.dumps({"text": "abcdefgh"[: 1 + n % 8] + str(n)}) for n in range(file, count, files))
        (folder / f"{file}.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def rows_of(path, which="train", **data):
    config = DataConfig.model_validate(
        {"train": str(path), "validation": str(path), "sequence_length": SIZE, "cache_dir": None, **data}
    )
    return open_rows(config, 0, which, TOKENIZER, vocab_size=512, rejects_dir=None)


def loader_of(rows, **options):
    return StepLoader(rows, **{"rows_per_step": 4, "micro_batch_tokens": SIZE, "epochs": 3, **options})


def documents_of(step):
    return [d for batch in step.microbatches for d in batch.documents if d >= 0]


def tensors(step):
    return [(b.input_ids.tolist(), b.labels.tolist(), b.cu_seqlens, b.microbatch) for b in step.microbatches]


@pytest.mark.parametrize("packing", [None, {}])
def test_a_stop_after_every_step_of_three_epochs_changes_nothing(tmp_path, packing):
    rows = rows_of(write(tmp_path / "d", 10), packing=packing)
    options = {"rows_per_step": 2, "num_workers": 2}
    straight = [tensors(step) for step in loader_of(rows, **options)]
    for stop in range(1, len(straight)):
        first = loader_of(rows, **options)
        joined = [tensors(step) for step in islice(first, stop)]
        second = loader_of(rows, **options | {"num_workers": stop % 2})
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert joined + [tensors(step) for step in second] == straight


@pytest.mark.parametrize("files", [1, 3, 8])
def test_samples_of_a_step_are_the_same_on_any_number_of_ranks(tmp_path, files):
    folder = write(tmp_path / "d", 8, files)

    def steps(ranks, state=None, stop=None):
        loaders = [loader_of(rows_of(folder), data_ranks=ranks, rank=r, num_workers=2) for r in range(ranks)]
        for loader in loaders:
            if state:
                loader.load_state_dict(state)
        seen = [
            sorted(d for step in together for d in documents_of(step))
            for together in islice(zip(*loaders, strict=True), stop)
        ]
        return seen, loaders[-1].state_dict()

    straight, _ = steps(2)
    assert [sorted(a + b) for a, b in zip(straight[::2], straight[1::2], strict=True)] == 3 * [list(range(8))]
    for stop in (1, 2):
        begun, state = steps(2, stop=stop)
        for ranks in (1, 4):
            assert begun + steps(ranks, state)[0] == straight


def test_without_a_usable_record_the_reasons_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 5}\n{"text": ""}\n{"text":\n{"text": ""}\n')
    options = {"format": "text", "on_bad_record": "skip", "max_skipped_fraction": 1}
    with pytest.raises(DataError, match=r"0 usable records of 4 read \(2 empty, 1 wrong_type, 1 invalid_json\)"):
        rows_of(path, **options)


def test_fewer_samples_than_a_step_are_one_short_step_or_none(tmp_path):
    rows = rows_of(write(tmp_path / "d", 3))
    (step,) = loader_of(rows, epochs=1, micro_batch_tokens=2 * SIZE)
    assert sorted(documents_of(step)) == [0, 1, 2]
    assert [batch.tokens for batch in step.microbatches] == [2 * SIZE] * 2
    filler = step.microbatches[1].labels[SIZE:]
    assert filler.tolist() == [-100] * SIZE
    assert step.num_targets == step.global_targets == sum(int((b.labels != -100).sum()) for b in step.microbatches)
    with pytest.raises(ConfigError, match="0 steps per epoch: 3 rows, global batch 4"):
        loader_of(rows, epochs=1, drop_last=True)


def test_ranks_without_samples_join_every_step(tmp_path):
    rows = rows_of(write(tmp_path / "d", 3))
    steps = [next(iter(loader_of(rows, epochs=1, data_ranks=4, rank=rank))) for rank in range(4)]
    assert [len(step.microbatches) for step in steps] == [1] * 4
    assert [step.num_documents for step in steps] == [1, 1, 1, 0]
    assert {step.global_targets for step in steps} == {sum(step.num_targets for step in steps)}


def test_a_tail_ends_an_epoch_and_runs_into_the_next_where_steps_are_counted(tmp_path):
    rows = rows_of(write(tmp_path / "d", 5))
    assert [step.num_documents for step in loader_of(rows, rows_per_step=2, epochs=1)] == [2, 2, 1]
    assert [step.num_documents for step in loader_of(rows, rows_per_step=2, epochs=None, steps=3)] == [2, 2, 2]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_validation_is_every_sample_once_on_any_number_of_ranks(tmp_path, ranks):
    rows = rows_of(write(tmp_path / "d", 7), "validation")
    parts = [list(evaluation_batches(rows, rows.pack_size, data_ranks=ranks, rank=rank)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    seen = sorted(d for part in parts for batch in part for d in batch.documents if d >= 0)
    assert seen == list(range(7))
    labels = sum(int((batch.labels != -100).sum()) for part in parts for batch in part)
    assert labels == rows.metadata["num_target_tokens"]


def test_a_microbatch_may_have_no_target(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    rows = rows_of(path, eos="never", on_bad_record="skip", max_skipped_fraction=1, bos="always")
    for step in loader_of(rows, epochs=1):
        assert step.num_targets == 2
    (short,) = loader_of(rows, epochs=1, data_ranks=3, rank=2)
    assert short.num_targets == 0
    assert set(short.microbatches[0].labels.tolist()) == {-100}


NOISE = st.one_of(
    st.integers(0, 99).map(lambda n: json.dumps({"text": f"t{n}"}).encode()),
    st.sampled_from([b"", b" \t", b"\r", b'{"text":', b"[1]", b'{"text": "\xff"}', '{"text": "a\u2028b"}'.encode()]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(NOISE, min_size=1, max_size=12), end=st.sampled_from([b"\n", b"\r\n"]), final=st.booleans())
def test_every_line_is_used_or_left_out_under_its_number(tmp_path, lines, end, final):
    path = tmp_path / "a.jsonl"
    path.write_bytes(end.join(lines) + (end if final else b""))
    good = [number for number, line in enumerate(lines, start=1) if b'"}' in line and b"\xff" not in line]
    blank = sum(not line.strip(b" \t\r") for line in lines)
    if not good:
        return
    options = {"format": "text", "on_bad_record": "skip", "max_skipped_fraction": 1}
    rows = rows_of(path, **options)
    facts = rows.metadata
    assert facts["records_used"] == rows.num_documents == len(good)
    assert facts["records_read"] == len(lines) - blank == len(good) + sum(facts["skipped"].values())
    assert [rows._documents.origin(n) for n in range(len(good))] == [f"{path}:{number}" for number in good]
    whole = list(read_jsonl(path))
    for after in range(len(lines) + 1):
        rest = [r.place.number for r in read_jsonl(path, after)]
        assert rest == [r.place.number for r in whole if r.place.number > after]
