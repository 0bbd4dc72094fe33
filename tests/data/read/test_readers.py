import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.data.read.readers import read_file
from freight.data.read.records import Reason
from freight.errors import DataError

ROWS = [{"text": f"t{n}"} | ({"extra": n} if n % 3 else {}) for n in range(700)]


def table():
    return pa.table({"text": [row["text"] for row in ROWS], "extra": [row.get("extra") for row in ROWS]})


def write(folder, kind):
    """The rows as a file of some kind."""
    path = folder / f"data.{kind}"
    match kind:
        case "parquet":
            pq.write_table(table(), path, row_group_size=150)
        case "arrow" | "stream":
            path = folder / f"{kind}.arrow"
            new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
            with new(str(path), table().schema) as writer:
                writer.write_table(table(), max_chunksize=300)
        case "json":
            path.write_text(json.dumps(ROWS))
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case "jsonl.gz":
            path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    return path, {"stream": "arrow", "jsonl.gz": "jsonl"}.get(kind, kind)


KINDS = ["parquet", "arrow", "stream", "json", "jsonl", "jsonl.gz"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_yields_the_same_records_from_any_place_on(tmp_path, kind):
    path, reader = write(tmp_path, kind)
    whole = list(read_file(path, reader))
    assert [record.value for record in whole] == ROWS
    assert [record.place.number for record in whole] == list(range(1, 701))
    assert 0 < whole[0].consumed <= whole[-1].consumed <= path.stat().st_size
    for after in (-1, 0, 1, 149, 150, 151, 299, 300, 599, 699, 700, 900):
        rest = [(record.place.number, record.value) for record in read_file(path, reader, after)]
        assert rest == [(record.place.number, record.value) for record in whole[max(0, after) :]]


@pytest.mark.parametrize(("kind", "words"), [("parquet", "Parquet file"), ("arrow", "Arrow file")])
def test_a_broken_table_is_named(tmp_path, kind, words):
    path, reader = write(tmp_path, kind)
    path.write_bytes(b"not a table" * 5)
    with pytest.raises(DataError, match=f"{path.name}: not a readable {words}"):
        list(read_file(path, reader))


def read_text(tmp_path, content, kind):
    path = tmp_path / "book.txt"
    path.write_bytes(content)
    return list(read_file(path, kind))


def test_lines_and_paragraphs_of_a_text_know_their_bytes(tmp_path):
    content = "\ufeffeins\r\nzw\u2028ei\n\n \t\ndrei".encode()
    lines = read_text(tmp_path, content, "line")
    assert [record.value["text"] for record in lines] == ["eins", "zw\u2028ei", "drei"]
    assert str(lines[1].place) == f"{tmp_path}/book.txt: bytes 9..16"
    assert all(content[r.place.number : r.place.stop].decode() == r.value["text"] for r in lines)
    paragraphs = read_text(tmp_path, content, "paragraph")
    assert [record.value["text"] for record in paragraphs] == ["eins\r\nzw\u2028ei", "drei"]
    assert all(content[r.place.number : r.place.stop].decode() == r.value["text"] for r in paragraphs)


def test_broken_bytes_spoil_one_record_only(tmp_path):
    first, bad, last = read_text(tmp_path, b"a\nb\xff\nc", "line")
    assert (first.value, last.value) == ({"text": "a"}, {"text": "c"})
    assert (bad.fault.reason, str(bad.place)) == (Reason.INVALID_UTF8, f"{tmp_path}/book.txt: bytes 2..4")


@settings(max_examples=60)
@given(st.text(alphabet="ab\n\r \t\u2028", max_size=40), st.sampled_from(["line", "paragraph"]), st.data())
def test_text_is_cut_without_a_loss(tmp_path_factory, text, kind, data):
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(text.encode())
    records = list(read_file(path, kind))
    ink = text.translate(dict.fromkeys(map(ord, "\n\r \t")))
    assert "".join(record.value["text"] for record in records).translate(dict.fromkeys(map(ord, "\n\r \t"))) == ink
    assert all(record.value["text"].strip("\n\r \t") for record in records)
    cut = data.draw(st.integers(0, len(records)))
    after = records[cut - 1].place.number if cut else -1
    assert list(read_file(path, kind, after)) == records[cut:]
