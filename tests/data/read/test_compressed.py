import gzip
import json

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.data.read.compressed import open_bytes
from freight.data.read.jsonl import read_jsonl
from freight.errors import DataError

LINES = b"".join(json.dumps({"text": f"{number} " + "ab" * (number % 50)}).encode() + b"\n" for number in range(5000))
PACKERS = {".gz": gzip.compress, ".zst": zstandard.compress}


def write(tmp_path, content, suffix):
    path = tmp_path / f"data.jsonl{suffix}"
    path.write_bytes(content)
    return path


def unpacked(path):
    file, _ = open_bytes(path)
    with file:
        return file.read()


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_packed_file_reads_as_the_plain_one(tmp_path, suffix):
    plain = list(read_jsonl(write(tmp_path, LINES, "")))
    packed = list(read_jsonl(write(tmp_path, PACKERS[suffix](LINES), suffix)))
    assert [(r.place.number, r.value, r.raw) for r in packed] == [(r.place.number, r.value, r.raw) for r in plain]
    assert packed[-1].consumed == packed[-1].place.path.stat().st_size, "progress counts bytes of the packed file"
    assert sorted(r.consumed for r in packed) == [r.consumed for r in packed]


@pytest.mark.parametrize("suffix", PACKERS)
def test_lines_before_a_place_are_passed_over(tmp_path, suffix):
    path = write(tmp_path, PACKERS[suffix](LINES), suffix)
    assert [r.place.number for r in read_jsonl(path, after=4998)] == [4999, 5000]


@settings(max_examples=40)
@given(parts=st.lists(st.binary(max_size=200), max_size=4), suffix=st.sampled_from(sorted(PACKERS)))
def test_frames_in_a_row_are_one_stream(tmp_path_factory, parts, suffix):
    path = write(tmp_path_factory.getbasetemp(), b"".join(PACKERS[suffix](part) for part in parts), suffix)
    assert unpacked(path) == b"".join(parts)


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_an_incomplete_file_is_named_with_what_was_read(tmp_path, suffix, share):
    packed = PACKERS[suffix](LINES)
    path = write(tmp_path, packed[: int(len(packed) * share)], suffix)
    with pytest.raises(DataError, match=rf"data.jsonl{suffix}: after [\d,]+ lines .* the file is incomplete"):
        list(read_jsonl(path))


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("place", ["front", "middle"])
def test_a_damaged_file_is_named(tmp_path, suffix, place):
    packed = bytearray(PACKERS[suffix](LINES))
    at = 0 if place == "front" else len(packed) // 2
    packed[at : at + 40] = b"x" * 40
    with pytest.raises(DataError, match=rf"data.jsonl{suffix}: after [\d,]+ lines .* damaged"):
        list(read_jsonl(write(tmp_path, bytes(packed), suffix)))


def test_zeros_may_pad_gzip_and_other_rubbish_may_not(tmp_path):
    assert unpacked(write(tmp_path, gzip.compress(b"a") + b"\0" * 100, ".gz")) == b"a"
    with pytest.raises(DataError, match="damaged"):
        unpacked(write(tmp_path, gzip.compress(b"a") + b"rubbish", ".gz"))
