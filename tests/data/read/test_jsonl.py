import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.data.read.jsonl import read_json_array, read_jsonl
from freight.data.read.records import Reason
from freight.errors import DataError


def read(tmp_path: Path, content: bytes, reader=read_jsonl, name: str = "data.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    return list(reader(path))


def reasons(records):
    return [(record.place.number, record.fault.reason) for record in records if record.fault]


def test_byte_order_mark_is_removed_at_the_front_only(tmp_path):
    marked = read(tmp_path, b'\xef\xbb\xbf{"text":"a"}\n{"text":"b\xef\xbb\xbf"}\n')
    assert [record.value for record in marked] == [{"text": "a"}, {"text": "b\ufeff"}]


def test_a_mark_on_a_later_line_and_other_white_space_are_not_passed_over(tmp_path):
    records = read(tmp_path, b'{"a":1}\n\xef\xbb\xbf{"a":2}\n\x0c\n\x0b\n \t\r\n{"a":3}')
    assert reasons(records) == [(number, Reason.INVALID_JSON) for number in (2, 3, 4)]
    assert records[-1].place.number == 6


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_other_encodings_are_named(tmp_path, encoding):
    with pytest.raises(DataError, match=f"is in {encoding.upper()}; save it as UTF-8"):
        read(tmp_path, '{"text": "a"}'.encode(encoding))


def test_lines_end_at_line_feeds_only(tmp_path):
    content = '{"text":"a\u2028b\u0085c"}\r\n\n   \n{"text":"d"}'.encode()
    records = read(tmp_path, content)
    assert [(record.place.number, record.value) for record in records] == [
        (1, {"text": "a\u2028b\u0085c"}),
        (4, {"text": "d"}),
    ]
    assert len(records[0].value["text"]) == 5


def test_lines_are_parsed_alone_however_long_and_faults_have_their_line(tmp_path):
    long = "x" * (12 << 20)
    lines = [
        '{"messages":[{"role":"user","content":"a"}]}',
        '{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}]}',
        '{"messages":[],"extra":1}',
        json.dumps({"text": long}),
        '{"text":',
        "[1]",
    ]
    records = read(tmp_path, "\n".join(lines).encode())
    assert [set(record.value) for record in records[:4]] == [
        {"messages"},
        {"messages"},
        {"messages", "extra"},
        {"text"},
    ]
    assert len(records[3].value["text"]) == len(long)
    assert reasons(records) == [(5, Reason.INVALID_JSON), (6, Reason.NOT_AN_OBJECT)]
    assert str(records[4].place) == f"{tmp_path}/data.jsonl:5"


@pytest.mark.parametrize(
    ("line", "reason", "words"),
    [
        (b'{"a": NaN}', Reason.INVALID_JSON, "NaN is not JSON"),
        (b'{"a": -Infinity}', Reason.INVALID_JSON, "Infinity"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', Reason.DUPLICATE_KEY, "more than once"),
        (b'{"a": "\\ud83d"}', Reason.INVALID_JSON, "surrogate"),
        (b'{"a": "\x01"}', Reason.INVALID_JSON, "control character"),
        (b'{"a": "\xff"}', Reason.INVALID_UTF8, "byte 8"),
        (b'{"a": 1} {"a": 2}', Reason.INVALID_JSON, "Extra data at column 10"),
        (b"[" * 100_000, Reason.INVALID_JSON, "Nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", Reason.INVALID_JSON, "digits"),
        (b'"text"', Reason.NOT_AN_OBJECT, "expected an object"),
    ],
)
def test_what_the_standard_parser_lets_through_is_refused(tmp_path, line, reason, words):
    (before, bad, after) = read(tmp_path, b'{"a": "\\ud83d\\ude00"}\n' + line + b'\n{"b": 2}')
    assert before.value == {"a": "😀"} and after.value == {"b": 2}
    assert bad.fault.reason is reason and words in bad.fault.message and bad.place.number == 2


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
RECORDS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
NOISE = st.binary(max_size=12).map(lambda noise: noise.replace(b"\n", b""))


@settings(max_examples=150)
@given(
    lines=st.lists(st.tuples(st.booleans(), RECORDS, NOISE), max_size=8),
    ends=st.sampled_from([b"\n", b"\r\n"]),
    final=st.booleans(),
    ascii_only=st.booleans(),
)
def test_every_line_is_a_record_a_fault_or_blank(tmp_path_factory, lines, ends, final, ascii_only):
    encoded = [json.dumps(record, ensure_ascii=ascii_only).encode() if good else noise for good, record, noise in lines]
    content = ends.join(encoded) + (ends if final else b"")
    if content.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        content = b" " + content
    path = tmp_path_factory.getbasetemp() / "noise.jsonl"
    path.write_bytes(content)
    records = {record.place.number: record for record in read_jsonl(path)}
    for number, ((good, record, _), line) in enumerate(zip(lines, encoded, strict=True), start=1):
        if good:
            assert records[number].value == record
        elif line.strip(b" \t\r"):
            read_back = records[number]
            assert (read_back.value is None) != (read_back.fault is None)
        else:
            assert number not in records
    blank = sum(not line.strip(b" \t\r") for line in encoded)
    assert len(records) == len(encoded) - blank
    one_line_at_a_time = [line for line in content.split(b"\n") if line.strip(b" \t\r")]
    assert [record.raw for record in records.values()] == [line.removesuffix(b"\r") for line in one_line_at_a_time]


def test_array_elements_are_records_and_survive_a_faulty_neighbour(tmp_path):
    records = read(tmp_path, b' [{"a": 1}, {"b": NaN}, 3, {"c": "\xc3\xa4"}] ', read_json_array, "list.json")
    assert [record.value for record in records] == [{"a": 1}, None, None, {"c": "ä"}]
    assert reasons(records) == [(2, Reason.INVALID_JSON), (3, Reason.NOT_AN_OBJECT)]
    assert str(records[1].place).endswith("list.json: element 2")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"rows": [{"a": 1}]}', "in `rows`: save that alone"),
        (b'{"a": 1}\n{"a": 2}\n', "rename it to .jsonl"),
        (b'[{"a": 1},]', "element 1: Expected `,` and an element, or `]` at column 11"),
        (b'[{"a": 1}', "element 1"),
        (b'[{"a": 1}, {"a": }]', "element 2: Expecting value at column 18"),
        (b"[] x", "Extra data after the array"),
        (b"", "not a JSON array"),
    ],
)
def test_json_files_that_are_not_one_array_are_refused_with_a_way_out(tmp_path, content, words):
    with pytest.raises(DataError) as caught:
        read(tmp_path, content, read_json_array, "list.json")
    assert words in str(caught.value)


@settings(max_examples=50)
@given(st.lists(RECORDS, max_size=5), st.sampled_from([None, 1]))
def test_any_array_is_read_back(tmp_path_factory, records, indent):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(records, indent=indent), encoding="utf-8")
    assert [record.value for record in read_json_array(path)] == records
