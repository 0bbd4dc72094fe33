"""`freight show`: record N is record N, whatever stands before it, and a bad one is told by its fault."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_commands import freight
from tests.cli.tiny_files import tokenizer


def line(text):
    return json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]})


@pytest.fixture
def shown(tmp_path):
    records = [line("first"), "{", "", line("second"), json.dumps({"messages": 5})]
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(records))
    folder = tokenizer(tmp_path / "tokenizer")
    return lambda number: freight("show", data, "--tokenizer", folder, "--record", str(number))


def test_a_record_is_shown_by_its_number_though_bad_ones_stand_before(shown):
    for number, (place, text) in {0: ("chats.jsonl:1", "first"), 2: ("chats.jsonl:4", "second")}.items():
        result = shown(number)
        assert result.exit_code == 0, result.output
        assert f"{place}: " in result.stdout and text in result.stdout and "⟦" in result.stdout


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "chats.jsonl:2: "),
        (3, "chats.jsonl:5: messages: expected a list"),
        (9, "record 9 does not exist; there are 4"),
    ],
)
def test_a_record_that_cannot_be_shown_says_why(shown, number, words):
    result = shown(number)
    assert result.exit_code == 2
    assert words in result.stderr, result.stderr


def test_every_piece_of_a_long_text_is_shown(tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "ab"}\n{"text": "abcdefghij"}\n')
    (tmp_path / "run.yaml").write_text(
        f"model: {{preset: debug}}\n"
        f"data: {{train: {tmp_path}/texts.jsonl, tokenizer: {tokenizer(tmp_path / 'tokenizer')}, sequence_length: 4}}\n"
        "train: {steps: 1, global_batch_size: 1, optimizer: {lr: 1.0e-3}}\n"
    )
    result = freight("show", tmp_path / "run.yaml", "--record", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("texts.jsonl:2: ") >= 3 and "texts.jsonl:1" not in result.stdout
