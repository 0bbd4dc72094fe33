"""NeMo's packed files: both meanings of the mask, exact round trips, and nothing in a file is ever run."""

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freight.data.load.microbatch import build_microbatch
from freight.data.pack.npy_file import NpyFile, check_npy_mask, write_npy
from freight.data.pack.npy_pickle import read_objects
from freight.errors import ConfigError, DataError

MASKS = ("token", "label")
QUICK = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def nemo_rows(draw):
    """Rows as NeMo packs them, values of every size that pickle writes differently."""
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        sizes = draw(st.lists(st.integers(2, 24), min_size=1, max_size=3))
        tokens = st.integers(0, draw(st.sampled_from([200, 60_000, 200_000])))
        rows.append(
            {
                "input_ids": draw(st.lists(tokens, min_size=sum(sizes), max_size=sum(sizes))),
                "loss_mask": draw(st.lists(st.booleans(), min_size=sum(sizes), max_size=sum(sizes))),
                "seq_start_id": [sum(sizes[:i]) for i in range(len(sizes))],
            }
        )
    return rows


def saved(path: Path, rows, protocol: int | None = None) -> Path:
    """As NeMo saves: an array of mappings."""
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    if protocol is None:
        np.save(path, array, allow_pickle=True)
        return path
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": array.shape})
        pickle.dump(array, file, protocol=protocol)
    return path


def consumed(row, mask):
    """What NeMo's data set makes of a row: inputs, labels and their mask, sequence by sequence."""
    starts = [*row["seq_start_id"], len(row["input_ids"])]
    out = []
    for start, end in pairwise(starts):
        ids, targets = row["input_ids"], row["loss_mask"]
        used = targets[start + 1 : end] if mask == "token" else targets[start : end - 1]
        labels = [int(i) if used else -100 for i, used in zip(ids[start + 1 : end], used, strict=True)]
        out.append(([int(i) for i in ids[start : end - 1]], labels))
    return out


def trained(row):
    """What Freight makes of a row."""
    batch = build_microbatch([row], pack_size=row.num_tokens, num_rows=1)
    bounds = list(pairwise(batch.cu_seqlens))
    return [(batch.input_ids[a:b].tolist(), batch.labels[a:b].tolist()) for a, b in bounds]


@QUICK
@given(rows=nemo_rows(), mask=st.sampled_from(MASKS), protocol=st.sampled_from([None, 3, 4]))
def test_inputs_and_labels_are_those_that_nemo_computes(tmp_path, rows, mask, protocol):
    path = saved(tmp_path / "x.npy", rows, protocol)
    assert [trained(row) for row in NpyFile(path, mask)] == [consumed(row, mask) for row in rows]


@QUICK
@given(rows=nemo_rows(), mask=st.sampled_from(MASKS), other=st.sampled_from(MASKS))
def test_what_is_written_again_has_the_same_inputs_targets_and_starts(tmp_path, rows, mask, other):
    path, again = saved(tmp_path / "x.npy", rows), tmp_path / "y.npy"
    write_npy(again, NpyFile(path, mask), len(rows), other, pad_id=7)
    loaded = np.load(again, allow_pickle=True).tolist()
    assert [consumed(row, other) for row in loaded] == [consumed(row, mask) for row in rows]
    assert [row["seq_start_id"] for row in loaded] == [row["seq_start_id"] for row in rows]
    assert {type(item) for row in loaded for item in row["loss_mask"]} == {bool}


def test_the_two_meanings_of_the_mask_differ_by_one_place(tmp_path):
    # a prompt of 3 tokens and an answer of 2, marked on the answer's own tokens
    path = saved(
        tmp_path / "x.npy", [{"input_ids": [1, 2, 3, 8, 9], "loss_mask": [0, 0, 0, 1, 1], "seq_start_id": [0]}]
    )
    (token,), (label,) = NpyFile(path, "token"), NpyFile(path, "label")
    assert trained(token) == [([1, 2, 3, 8], [-100, -100, 8, 9])]
    assert trained(label) == [([1, 2, 3, 8], [-100, -100, -100, 9])]
    assert (token.tail_labels.tolist(), token.lengths.tolist()) == ([9], [4])


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_scalars_floats_and_shared_lists_are_read(tmp_path, protocol):
    shared = [True, False] * 10
    rows = [
        {"input_ids": np.arange(20, dtype=np.int32), "loss_mask": shared, "seq_start_id": np.array([0, 5])},
        {"input_ids": list(np.arange(20)), "loss_mask": shared, "seq_start_id": (np.int64(0),), "extra": None},
        {"input_ids": np.arange(20).astype(">i8"), "loss_mask": np.ones(20), "seq_start_id": [0]},
    ]
    rows[1]["seq_start_id"] = [np.int64(0)]
    file = NpyFile(saved(tmp_path / "x.npy", rows, protocol), "token")
    read = list(file)
    assert [row.ids.tolist() for row in read] == [[*range(4), *range(5, 19)], [*range(19)], [*range(19)]]
    assert [row.num_targets for row in read] == [9, 9, 19]
    assert file.unread_keys == {"extra"}


class Attack:
    def __reduce__(self):
        return (exec, ("raise SystemExit('run')",))


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("place", ["row", "field", "item"])
def test_a_file_that_names_anything_else_is_refused_and_nothing_is_run(tmp_path, protocol, place):
    good = {"input_ids": [1, 2], "loss_mask": [0, 1], "seq_start_id": [0]}
    rows = {
        "row": [good, Attack()],
        "field": [good | {"loss_mask": Attack()}],
        "item": [good | {"input_ids": [1, Attack()]}],
    }[place]
    with pytest.raises(DataError, match=r"x\.npy: names `(builtins|__builtin__)\.exec`; only NumPy arrays"):
        list(NpyFile(saved(tmp_path / "x.npy", rows, protocol), "token"))


@pytest.mark.parametrize("name", ["os.system", "numpy.load", "builtins.eval", "numpy.core.multiarray.fromfile"])
def test_names_are_compared_whole(tmp_path, name):
    module, function = name.rsplit(".", 1)
    path = saved(tmp_path / "x.npy", [])
    header = path.read_bytes()[: path.read_bytes().index(b"\n") + 1]
    path.write_bytes(header + f"\x80\x03c{module}\n{function}\n(X\x01\0\0\0atR.".encode("latin-1"))
    with pytest.raises(DataError, match=f"names `{name}`"):
        list(read_objects(path))


GOOD = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1], "seq_start_id": [0, 2]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"loss_mask": None}, "`loss_mask` must be a list of integers; got NoneType"),
        ({"loss_mask": [0, 1]}, "`loss_mask` has 2 entries for 4 `input_ids`"),
        ({"loss_mask": [0, 1, 2, 1]}, "`loss_mask` holds 2 at place 2; only 0 and 1"),
        ({"loss_mask": [0, 0.5, 0, 1]}, "`loss_mask` must be a list of integers; got 0.5 at place 1"),
        ({"input_ids": [1, -2, 3, 4]}, "`input_ids` holds -2 at place 1, which is no token id"),
        ({"input_ids": [1, 2**40, 3, 4]}, "`input_ids` holds 1099511627776 at place 1"),
        ({"input_ids": [1, 2**70, 3, 4]}, "`input_ids` must be a list of integers"),
        ({"input_ids": [1, "a", 3, 4]}, "`input_ids` holds items that are no numbers"),
        ({"input_ids": [[1, 2], [3, 4]]}, "`input_ids` holds items that are no numbers"),
        ({"input_ids": [1, float("nan"), 3, 4]}, "`input_ids` must be a list of integers; got nan"),
        ({"seq_start_id": [1, 2]}, r"`seq_start_id` must begin with 0; got \[1\]"),
        ({"seq_start_id": []}, r"`seq_start_id` must begin with 0; got \[\]"),
        ({"seq_start_id": [0, 2, 2]}, "sequence 1 starts at 2 and has 0 tokens"),
        ({"seq_start_id": [0, 3, 2]}, "sequence 1 starts at 3 and has -1 tokens"),
        ({"seq_start_id": [0, 4]}, "sequence 1 starts at 4 and has 0 tokens"),
        ({"seq_start_id": [0, 3]}, "sequence 1 is one token"),
        ({"input_ids": [], "loss_mask": [], "seq_start_id": []}, "must begin with 0"),
    ],
)
def test_a_row_that_cannot_be_is_named(tmp_path, changes, sentence):
    path = saved(tmp_path / "x.npy", [GOOD, GOOD | changes])
    with pytest.raises(DataError, match=f"x.npy: row 1: .*{sentence}"):
        list(NpyFile(path, "token"))


def test_other_files_are_refused(tmp_path):
    missing = {key: value for key, value in GOOD.items() if key != "loss_mask"}
    with pytest.raises(DataError, match="row 0: `loss_mask` is missing; it has input_ids, seq_start_id"):
        list(NpyFile(saved(tmp_path / "x.npy", [missing]), "token"))
    with pytest.raises(DataError, match="row 1 is no mapping"):
        list(NpyFile(saved(tmp_path / "x.npy", [GOOD, 3, GOOD]), "token"))
    np.save(tmp_path / "x.npy", np.arange(3))
    with pytest.raises(DataError, match="holds an array of int64"):
        NpyFile(tmp_path / "x.npy", "token")
    (tmp_path / "x.npy").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"is no \.npy file"):
        NpyFile(tmp_path / "x.npy", "token")
    assert list(NpyFile(saved(tmp_path / "x.npy", []), "token")) == []


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1), value=st.integers(0, 255), cut=st.booleans(), protocol=st.sampled_from([3, 4]))
def test_a_damaged_file_is_an_error_or_reads_as_rows(tmp_path, place, value, cut, protocol):
    whole = bytearray(saved(tmp_path / "x.npy", [GOOD] * 3, protocol).read_bytes())
    at = min(int(place * len(whole)), len(whole) - 1)
    whole[at] = value
    (tmp_path / "x.npy").write_bytes(whole[:at] if cut else whole)
    try:
        rows = list(NpyFile(tmp_path / "x.npy", "token"))
    except DataError as error:
        assert "x.npy" in str(error)
    else:
        assert not cut
        assert all(row.num_tokens == row.lengths.sum() > 0 for row in rows)


def test_a_name_without_an_end_does_not_send_the_reader_round_in_circles(tmp_path):
    path = saved(tmp_path / "x.npy", [])
    header = path.read_bytes()[: path.read_bytes().index(b"\n") + 1]
    path.write_bytes(header + b"\x80\x03cos")
    with pytest.raises(DataError, match="ends in the middle of a name"):
        list(read_objects(path))


def test_pads_that_may_be_targets_are_counted(tmp_path):
    def row(ids, mask):
        return {"input_ids": ids, "loss_mask": mask, "seq_start_id": [0]}

    rows = [
        row([5, 6, 2, 2], [0, 1, 1, 1]),  # two targets with the pad id at the end
        row([5, 6, 7, 2], [0, 1, 1, 1]),  # one: an end of text
        row([5, 6, 2, 2], [0, 1, 0, 0]),  # not targets
        row([2, 2], [1, 1]),  # the first token is no target
    ]
    path = saved(tmp_path / "x.npy", rows)
    known, unknown = NpyFile(path, "token", pad_id=2), NpyFile(path, "token")
    assert len(list(known)) == len(list(unknown)) == 4
    assert (known.padded_rows, unknown.padded_rows) == (1, 0)


def test_the_meaning_of_the_mask_must_be_stated():
    assert check_npy_mask("label", "--npy-mask") == "label"
    with pytest.raises(ConfigError, match="`--npy-mask` must be token or label; it is missing"):
        check_npy_mask(None, "--npy-mask")
    with pytest.raises(ConfigError, match="got 'tokens'"):
        check_npy_mask("tokens", "--npy-mask")
