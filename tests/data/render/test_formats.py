from pathlib import Path

import pytest

from freight.data.read.records import Place, Reason, RecordFault
from freight.data.render.formats import PromptCompletion, Text, convert, detect_format, rename_fields
from freight.data.render.messages import Conversation
from freight.errors import DataError


def read(record, name, ignored=None):
    return convert(record, name, (ignored if ignored is not None else []).append)


def fault(record, name="messages"):
    with pytest.raises(RecordFault) as caught:
        read(record, name)
    return caught.value


def spoken(sample):
    assert isinstance(sample, Conversation)
    return [(message["role"], message["content"]) for message in sample.messages]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([{"messages": []}], "messages"),
        ([{"conversations": [], "text": ""}], "conversations"),
        ([{"prompt": "", "completion": ""}, {"prompt": [], "completion": []}], "prompt_completion"),
        ([{"instruction": "", "output": ""}, {"instruction": "", "response": ""}], "alpaca"),
        ([{"text": ""}, {"text": "", "messages": []}], "text"),
    ],
)
def test_the_first_format_that_fits_every_record(records, expected):
    places = [(Place(Path("a.jsonl"), "jsonl", number), record) for number, record in enumerate(records, start=1)]
    assert detect_format(places, "a.jsonl") == expected


def test_a_split_vote_shows_one_record_of_each_kind():
    records = [{"text": "a"}, {"text": "b"}, {"messages": [], "id": 1}, {"other": 1}]
    places = [(Place(Path("a.jsonl"), "jsonl", number), record) for number, record in enumerate(records, start=1)]
    with pytest.raises(DataError) as caught:
        detect_format(places, "a.jsonl")
    for words in (
        "text at a.jsonl:1",
        "messages at a.jsonl:3 with keys ['id', 'messages']",
        "no known format at a.jsonl:4",
    ):
        assert words in str(caught.value)
    assert "set data.format" in str(caught.value)


def test_where_no_record_has_a_known_format_the_known_ones_are_named():
    with pytest.raises(DataError) as caught:
        detect_format([(Place(Path("a.jsonl"), "jsonl", 1), {"question": "q", "answer": "a"})], "a.jsonl")
    for words in ("a.jsonl:1 has the keys ['answer', 'question']", "prompt + completion", "data.fields"):
        assert words in str(caught.value)


def test_roles_of_every_spelling():
    turns = [
        ("human", "user"),
        ("gpt", "assistant"),
        ("observation", "tool"),
        ("bot", "assistant"),
        ("system", "system"),
    ]
    record = {"conversations": [{"from": role, "value": str(i)} for i, (role, _) in enumerate(turns)], "system": "S"}
    expected = [("system", "S"), *((role, str(i)) for i, (_, role) in enumerate(turns))]
    assert spoken(read(record, "conversations")) == expected
    assert read(record, "conversations").weights == (0, 0, 1, 0, 1, 0)


def test_alpaca_with_input_history_and_either_spelling():
    record = {"instruction": "do", "input": "this", "output": "done", "history": [["q", "a"]], "system": "S"}
    expected = [("system", "S"), ("user", "q"), ("assistant", "a"), ("user", "do\n\nthis"), ("assistant", "done")]
    assert spoken(read(record, "alpaca")) == expected
    other = {"instruction": "do", "context": "", "response": "done"}
    assert spoken(read(other, "alpaca")) == [("user", "do"), ("assistant", "done")]


def test_plain_shapes():
    assert read({"text": "a"}, "text") == Text("a")
    assert read({"prompt": "a", "completion": " b "}, "prompt_completion") == PromptCompletion("a", " b ")


@pytest.mark.parametrize("prompt", [[], [{"role": "user", "content": "q"}]])
def test_a_system_text_stands_before_prompt_messages_and_before_none(prompt):
    record = {"prompt": prompt, "completion": [{"role": "assistant", "content": "a"}], "system": "S"}
    found = read(record, "prompt_completion")
    assert found.texts == ["S", *(turn["content"] for turn in prompt), "a"]
    assert found.weights == (0, *(0 for _ in prompt), 1)


def test_keys_that_are_not_used_are_told():
    ignored = []
    read({"messages": [{"role": "user", "content": "a", "mood": 1, "name": None}], "id": 1}, "messages", ignored)
    assert ignored == ["id", "messages.mood"]


def message(**fields):
    return {"messages": [{"role": "assistant", "content": "a", **fields}]}


@pytest.mark.parametrize(
    ("record", "name", "reason", "field"),
    [
        ({"text": 5}, "text", Reason.WRONG_TYPE, "text"),
        ({"text": ""}, "text", Reason.EMPTY, "text"),
        ({"prompt": "a", "completion": ["b"]}, "prompt_completion", Reason.WRONG_TYPE, "completion"),
        ({"prompt": "", "completion": ""}, "prompt_completion", Reason.EMPTY, "completion"),
        ({"instruction": "a", "output": None}, "alpaca", Reason.WRONG_TYPE, "output"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, "alpaca", Reason.WRONG_TYPE, "history"),
        ({"conversations": [{"value": "a"}]}, "conversations", Reason.MISSING_FIELD, "conversations[0].from"),
        (
            {"conversations": [{"from": "human", "value": 1}], "system": "S"},
            "conversations",
            Reason.WRONG_TYPE,
            "conversations[0].value",
        ),
        (
            {"prompt": [{"role": "user", "content": 1}], "completion": message()["messages"], "system": "S"},
            "prompt_completion",
            Reason.WRONG_TYPE,
            "prompt[0].content",
        ),
        ({"messages": {}}, "messages", Reason.WRONG_TYPE, "messages"),
        ({"messages": []}, "messages", Reason.EMPTY, "messages"),
        ({"messages": ["a"]}, "messages", Reason.WRONG_TYPE, "messages[0]"),
        ({"messages": [{"content": "a"}]}, "messages", Reason.MISSING_FIELD, "messages[0].role"),
        (message(role="critic"), "messages", Reason.UNKNOWN_ROLE, "messages[0].role"),
        (message(content=5), "messages", Reason.WRONG_TYPE, "messages[0].content"),
        (message(content=None), "messages", Reason.MISSING_FIELD, "messages[0].content"),
        (message(content=[{"type": "image"}]), "messages", Reason.UNSUPPORTED_PART, "messages[0].content[0]"),
        (message(weight=2), "messages", Reason.WRONG_TYPE, "messages[0].weight"),
        (message(role="user", weight=1), "messages", Reason.WRONG_TYPE, "messages[0].weight"),
        (message(tool_calls={}), "messages", None, ""),
        (message(tool_calls={"a": 1}), "messages", Reason.BAD_TOOL_CALL, "messages[0].tool_calls"),
        (
            message(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
            "messages",
            Reason.BAD_TOOL_CALL,
            "messages[0].tool_calls[0].function.arguments",
        ),
        (message(role="user", tool_calls=[{"name": "f"}]), "messages", Reason.BAD_TOOL_CALL, "messages[0].tool_calls"),
        ({**message(), "tools": [1]}, "messages", Reason.WRONG_TYPE, "tools"),
        ({"other": 1}, "messages", Reason.MISSING_FIELD, "messages"),
    ],
)
def test_each_fault_has_its_reason_and_field(record, name, reason, field):
    if reason is None:
        read(record, name)
        return
    found = fault(record, name)
    assert (found.reason, found.field) == (reason, field)


def test_tool_arguments_are_parsed_once():
    as_text = read(message(tool_calls=[{"function": {"name": "f", "arguments": '{"a": "\\"x\\""}'}}]), "messages")
    as_object = read(message(tool_calls=[{"name": "f", "arguments": {"a": '"x"'}}]), "messages")
    assert as_text == as_object
    assert as_text.messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": '"x"'}}


def test_a_renamed_column_hides_the_one_of_that_name():
    assert rename_fields({"text": "a", "body": "b", "id": 1}, {"text": "body"}) == {"text": "b", "id": 1}
    assert rename_fields({"text": "a"}, {"text": "body"}) == {}


def test_a_stray_key_of_another_format_replaces_nothing_and_is_told():
    turns = [{"from": "human", "value": "a", "role": "gpt"}, {"from": "gpt", "value": "b", "content": "c"}]
    ignored = []
    sample = read({"conversations": turns}, "conversations", ignored)
    assert spoken(sample) == [("user", "a"), ("assistant", "b")] and sample.weights == (0, 1)
    assert ignored == ["conversations.role", "conversations.content"]
