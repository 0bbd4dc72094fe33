"""Offsets from the bytes of tokens equal the tokenizer's own, to the last token, or are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from freight.data.render.byte_offsets import ByteTokens, byte_alphabet
from freight.data.render.tokenizer import Encoder
from tests.data.small_tokenizer import SPECIAL, small_tokenizer

MERGES = (("Ġ", "a"), ("a", "b"), ("Ã", "©"), ("Ċ", "b"), ("ð", "Ł"), ("ab", "ab"), ("Ġa", "ab"))
ENCODER = Encoder(small_tokenizer(merges=MERGES))


def test_the_alphabet_is_the_tokenizers():
    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for symbol, byte in alphabet.items():
        if byte < 128:
            assert decoders.ByteLevel().decode([symbol]) == chr(byte)
    assert sorted(alphabet.values()) == list(range(256))


@given(st.lists(st.sampled_from([*"ab \n\té日😀\u2028", *SPECIAL]) | st.text(max_size=3), max_size=20).map("".join))
def test_offsets_are_those_of_the_tokenizer(text):
    text = text.encode("utf-8", "ignore").decode()
    (fast,), (slow,) = ENCODER.encode([text]), ENCODER._encode_slowly([text])
    for mine, theirs in zip(fast, slow, strict=True):
        assert mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist()
    assert ENCODER._bytes.offsets(text, fast.ids.tolist()) is not None, "the fast way was taken"


def test_tokens_that_are_not_the_text_are_refused():
    tokens = ByteTokens({0: b"a", 1: b"b", 2: "é".encode()})
    assert tokens.offsets("ab", [0, 0]) is None
    assert tokens.offsets("ab", [0]) is None
    assert tokens.offsets("ab", [0, 7]) is None
    starts, stops = tokens.offsets("aéb", [0, 2, 1])
    assert (starts.tolist(), stops.tolist()) == ([0, 1, 2], [1, 2, 3])
    assert [len(part) for part in tokens.offsets("", [])] == [0, 0]


@pytest.mark.parametrize("strips", ["lstrip", "rstrip"])
def test_a_token_that_takes_spaces_with_it_has_the_tokenizers_offsets(strips):
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<cut>", special=True, **{strips: True})])
    encoder = Encoder(tokenizer)
    texts = ["a <cut> b", "plain"]
    for fast, slow in zip(encoder.encode(texts), encoder._encode_slowly(texts), strict=True):
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(fast, slow, strict=True))
    ids = encoder.encode(texts)[0].ids.tolist()
    assert encoder._bytes.offsets(texts[0], ids) is None


def test_other_kinds_of_tokenizers_count_offsets_themselves():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"))
    (encoded,) = encoder.encode(["a  b"])
    assert encoder._bytes is None and encoded.starts.tolist() == [0, 3] and encoded.stops.tolist() == [1, 4]
