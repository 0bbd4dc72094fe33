"""Stores of every tier against a dict, and the disk's faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freight.errors import OffloadError
from freight.memory import store_disk
from freight.memory.stores import DeviceStore, DiskStore, HostStore, Key, Slab, open_store

SLABS = {"a": Slab(3, 100), "b": Slab(4, 64)}
TIERS = ("none", "host", "disk")
KEYS = [Key(name, owner, chunk) for name in SLABS for owner in (0, 1) for chunk in (0, 1)]

Operation = tuple[str, int, int]


def fresh(number: int, key: Key) -> Tensor:
    """Some tensor that fits; those of `b` are float32 of one shape, to be added to."""
    generator = torch.Generator().manual_seed(number)
    if key.name == "b":
        return torch.randn(4, 4, generator=generator)
    shape, dtype = [((5, 3), torch.float32), ((7,), torch.bfloat16), ((2, 3), torch.float64), ((0, 3), torch.float32)][
        number % 4
    ]
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("tier", TIERS)
@settings(max_examples=40)
@given(
    operations=st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "get", "get", "prefetch", "free", "accumulate"]),
            st.integers(0, len(KEYS) - 1),
            st.integers(0, 99),
        ),
        max_size=40,
    )
)
def test_a_store_is_a_dict(tier: str, operations: list[Operation], tmp_path_factory: pytest.TempPathFactory) -> None:
    model: dict[Key, Tensor] = {}
    with open_store(tier, SLABS, directory=tmp_path_factory.getbasetemp()) as store:
        for name, index, number in operations:
            key = KEYS[index]
            room = key in model or sum(k.name == key.name for k in model) < SLABS[key.name].slots
            if name == "put" and room:
                store.put(key, fresh(number, key))
                model[key] = fresh(number, key)
            elif name == "accumulate" and key.name == "b" and room:
                store.accumulate(key, fresh(number, key))
                model[key] = model[key] + fresh(number, key) if key in model else fresh(number, key)
            elif name == "free":
                store.free(key)
                model.pop(key, None)
            elif name == "prefetch" and key in model:
                store.prefetch(key)
            elif name == "get" and key in model:
                assert_same(store.get(key), model[key])
        for key, expected in model.items():
            assert_same(store.get(key), expected)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and torch.equal(actual, expected)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_does_not_fit_is_refused(tier: str, tmp_path: Path) -> None:
    with open_store(tier, {"a": Slab(1, 8)}, directory=tmp_path) as store:
        with pytest.raises(OffloadError, match=r"12 bytes, its slot 8"):
            store.put(Key("a", 0), torch.zeros(3))
        store.put(Key("a", 0), torch.zeros(2))
        with pytest.raises(OffloadError, match=r"all 1 slots for `a`"):
            store.put(Key("a", 1), torch.zeros(2))
        assert (store.bytes_out, store.bytes_in) == (8, 0)
        store.get(Key("a", 0))


def test_sums_are_kept_in_float32() -> None:
    with DeviceStore() as device, HostStore({"a": Slab(1, 64)}, torch.device("cpu")) as host:
        for store in (device, host):
            store.accumulate(Key("a", 0), torch.ones(4, dtype=torch.bfloat16))
            store.accumulate(Key("a", 0), torch.full((4,), 2.0**-12))
            assert torch.equal(store.get(Key("a", 0)), torch.full((4,), 1 + 2.0**-12))


def test_a_directory_that_cannot_be_used_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(OffloadError, match=r"missing cannot be used: No such file or directory; 1024 bytes") as error:
        DiskStore({"a": Slab(16, 64)}, cpu, tmp_path / "missing")
    assert "\n" not in str(error.value)
    huge = 1 << 60
    with pytest.raises(OffloadError, match=rf"too little space; {huge} bytes are needed, \d+ are free"):
        DiskStore({"a": Slab(1, huge)}, cpu, tmp_path)

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store_disk.os, "open", refuse)
    with pytest.raises(OffloadError, match=r"Permission denied; 64 bytes are needed, \d+ are free"):
        DiskStore({"a": Slab(1, 64)}, cpu, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_file_has_no_name_and_leftovers_go(tmp_path: Path) -> None:
    (tmp_path / f"{store_disk.FILE_PREFIX}123-abcd").write_bytes(b"of a run that was killed")
    (tmp_path / "something else").write_bytes(b"")
    with DiskStore({"a": Slab(1, 64)}, torch.device("cpu"), tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["something else"]


def test_the_directory_may_lie_in_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "fast").mkdir()
    with open_store("disk", {"a": Slab(1, 64)}, directory="~/fast") as store:
        assert isinstance(store, DiskStore) and store._file.directory == tmp_path / "fast"


def test_a_write_that_fails_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore({"a": Slab(8, 64)}, torch.device("cpu"), tmp_path) as store:

        def fail(*_: object) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(store._file, "write", fail)
        with pytest.raises(OffloadError, match=r"Input/output error"):
            for chunk in range(4):
                store.put(Key("a", 0, chunk), torch.zeros(4))
        monkeypatch.setattr(store._file, "read", fail)
        store._writing.clear()
        with pytest.raises(OffloadError, match=r"Input/output error"):
            store.get(Key("a", 0, 0))


def test_resident_memory_does_not_grow(tmp_path: Path) -> None:
    size, chunks = 1 << 20, 64

    def resident() -> int:  # bytes of mapped files; the rest is the allocator's, and constant
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile")]
        return int(line.split()[1]) * 1024

    with DiskStore({"a": Slab(chunks, size)}, torch.device("cpu"), tmp_path) as store:
        before = resident()
        for chunk in range(chunks):
            store.put(Key("a", 0, chunk), torch.full((size,), chunk, dtype=torch.uint8))
        for chunk in range(chunks):
            assert store.get(Key("a", 0, chunk))[-1] == chunk
        assert resident() - before < chunks * size // 8
    assert store.bytes_in + store.bytes_out >= 2 * (chunks - 2) * size


@pytest.mark.parametrize("tier", TIERS)
@settings(max_examples=30)
@given(
    operations=st.lists(
        st.tuples(
            st.sampled_from(["write", "write", "read", "fetch", "lend", "drop"]), st.integers(0, 1), st.integers(0, 9)
        ),
        max_size=40,
    ),
    cuts=st.lists(st.sampled_from([3, 4, 5]), min_size=1, max_size=4),
)
def test_lent_tensors_hold_what_is_written_however_it_is_cut(
    tier: str, operations: list[Operation], cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows, like = 11, torch.zeros(1, 2)
    lent: dict[int, Tensor] = {}
    model: dict[int, Tensor] = {}
    with open_store(tier, {"h": Slab(2, rows * 8)}, directory=tmp_path_factory.getbasetemp()) as store:
        for turn, (name, index, number) in enumerate(operations):
            if name == "lend" and index not in lent:
                lent[index], model[index] = store.lend("h", like, rows), torch.zeros(rows, 2)
                store.write(lent[index], torch.zeros(rows, 2))
                assert store.holds(lent[index][3:5]) == (tier != "none") and not store.holds(like)
            elif name == "drop":
                lent.pop(index, None)
                model.pop(index, None)
            elif index in lent:
                size = cuts[turn % len(cuts)]
                start = number * size % rows
                part = slice(start, min(start + size, rows))
                if name == "write":
                    value = torch.full_like(model[index][part], turn)
                    model[index][part] = value
                    store.write(lent[index][part], value)
                elif name == "fetch":
                    store.fetch(lent[index][part])
                elif name == "read":
                    assert_same(store.read(lent[index][part]), model[index][part])
        for index, expected in model.items():
            assert_same(store.read(lent[index]), expected)
        lent.clear()
        again = [store.lend("h", like, rows) for _ in range(2)]  # what nothing holds has come back
        assert len(again) == 2


def test_a_view_keeps_a_lent_tensor(tmp_path: Path) -> None:
    with open_store("disk", {"h": Slab(1, 64)}, directory=tmp_path) as store:
        view = store.lend("h", torch.zeros(1, 4), 2)[1:].view(-1)
        with pytest.raises(OffloadError, match="all 1 slots for `h`"):
            store.lend("h", torch.zeros(1, 4), 2)
        del view
        store.lend("h", torch.zeros(1, 4), 2)
