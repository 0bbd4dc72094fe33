"""Prompts that look like training data, and text that streams by whole characters."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from freight.data.render.messages import Conversation
from freight.data.render.template import load_chat_template
from freight.errors import DataError
from freight.train.prompt import chat_ids, prompt_ids, read_chat, stop_ids, stream_text

BOS, EOS, START, END = 256, 257, 258, 259


def byte_tokenizer(*, adds_bos: bool = True) -> PreTrainedTokenizerBase:
    """Every byte is a token: any character beyond ASCII spans several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    inner.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


TOKENIZER = byte_tokenizer()


def chat(role: str, content: str) -> Conversation:
    return read_chat(json.dumps([{"role": role, "content": content}]), lambda key: None)


def text_of(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids))


def test_a_prompt_has_exactly_one_bos_if_the_tokenizer_adds_one() -> None:
    assert prompt_ids(TOKENIZER, "hi")[0] == BOS
    assert prompt_ids(TOKENIZER, "<s>hi").count(BOS) == 1
    assert BOS not in prompt_ids(byte_tokenizer(adds_bos=False), "hi")
    assert text_of(prompt_ids(TOKENIZER, "hi")) == "<s>hi"


def test_a_chat_ends_where_the_assistant_speaks() -> None:
    template = load_chat_template(TOKENIZER, "chatml", {})
    ids = chat_ids(TOKENIZER, template, chat("user", "hi"))
    assert ids.count(BOS) == 1
    assert text_of(ids).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_chats_that_cannot_be_rendered() -> None:
    with pytest.raises(DataError, match=r"no chat template; set `data\.chat_template`"):
        chat_ids(TOKENIZER, None, chat("user", "hi"))
    template = load_chat_template(TOKENIZER, "{{ raise_exception('users only') if messages[0].role != 'user' }}", {})
    with pytest.raises(DataError, match="users only"):
        chat_ids(TOKENIZER, template, chat("system", "hi"))


def test_a_chat_is_read_as_in_training() -> None:
    unused: list[str] = []
    record = {"conversations": [{"from": "human", "value": "hi", "mood": 1}, {"from": "gpt", "value": "yo"}], "id": 1}
    conversation = read_chat(json.dumps(record) + "\n{}", unused.append)
    assert [(m["role"], m["content"]) for m in conversation.messages] == [("user", "hi"), ("assistant", "yo")]
    assert unused == ["id", "messages.mood"]
    assert read_chat('[{"role": "human", "content": [{"type": "text", "text": "hi"}]}]', unused.append) == chat(
        "user", "hi"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"messages": [{"role": "critic", "content": "a"}]}', r"messages\[0\].role: expected one of .* got 'critic'"),
        ('{"messages": [{"role": "user", "content": 5}]}', r"messages\[0\].content: expected text"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": 5}', "tools: expected a list"),
        ('{"messages": [{"role": "user", "role": "user", "content": "a"}]}', "more than once"),
        ('{"messages": []}', "there are no messages"),
        ("{}", "no `messages`"),
        ("5", "no `messages`"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
    ],
)
def test_a_chat_that_training_would_refuse_is_refused(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_chat(text, lambda key: None)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"tools": [{"name": "f"}]}, "renders no tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "renders no tool calls"),
        ({"messages": [{"role": "assistant", "content": "a", "thinking": "x"}]}, "renders no reasoning"),
    ],
)
def test_what_the_template_would_leave_out_is_refused(extra: dict[str, object], words: str) -> None:
    record = {"messages": [{"role": "user", "content": "hi"}], **extra}
    with pytest.raises(DataError, match=words):
        chat_ids(
            TOKENIZER, load_chat_template(TOKENIZER, "chatml", {}), read_chat(json.dumps(record), lambda key: None)
        )


def test_stops_at_eos_and_at_the_end_of_a_turn() -> None:
    assert stop_ids(TOKENIZER) == {EOS}
    assert stop_ids(TOKENIZER, load_chat_template(TOKENIZER, "chatml", {})) == {EOS, END}
    plain = load_chat_template(TOKENIZER, "{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert stop_ids(TOKENIZER, plain) == {EOS}


@given(st.text(st.characters(codec="utf-8"), max_size=12), st.lists(st.integers(0, 11), max_size=3))
@settings(max_examples=60)
def test_streamed_pieces_are_the_text_and_never_half_a_character(text: str, places: list[int]) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert isinstance(ids, list)
    for place in places:
        ids.insert(min(place, len(ids)), END)
    whole = str(TOKENIZER.decode(ids, skip_special_tokens=True))
    pieces = list(stream_text(TOKENIZER, iter(ids)))
    assert "".join(pieces) == whole
    if not places and "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_text_comes_as_soon_as_a_character_is_whole() -> None:
    arrived: list[int] = []

    def ids() -> object:
        for i, token in enumerate(TOKENIZER("aé€b", add_special_tokens=False)["input_ids"]):  # type: ignore[arg-type]
            arrived.append(i)
            yield token

    seen = [(len(arrived), piece) for piece in stream_text(TOKENIZER, ids())]  # type: ignore[arg-type]
    assert seen == [(1, "a"), (3, "é"), (6, "€"), (7, "b")]
