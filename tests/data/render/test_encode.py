"""BOS, EOS, prompt and completion, length: what a document holds beyond its text."""

import pytest

from freight.config.schema import DataConfig
from freight.data.read.records import Reason, RecordFault
from freight.data.render.encode import EncodeCounts, SampleEncoder
from freight.data.render.formats import PromptCompletion, Text, convert
from freight.data.render.template import load_chat_template
from freight.data.render.tokenizer import Encoder
from freight.errors import DataError
from tests.data.small_tokenizer import CHATML, LLAMA3, small_tokenizer

WITHOUT_BOS = LLAMA3.replace("{{ bos_token }}", "")


def encoder_of(tokenizer, policy="error", limit=1000, vocab_size=1 << 20, **options):
    config = DataConfig(train="-", sequence_length=limit, truncation=policy, **options)
    template = load_chat_template(tokenizer, None, {})
    return SampleEncoder(config, Encoder(tokenizer), template, policy, vocab_size, EncodeCounts())


def one(encoder, sample):
    """The documents of a sample, or its fault raised."""
    (result,) = encoder.encode([sample])
    if isinstance(result, RecordFault):
        raise result
    return result


def chat(*texts):
    roles = ["user", "assistant"]
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return convert({"messages": messages}, "messages", lambda key: None)


def decoded(tokenizer, document, targets_only=False):
    return Encoder(tokenizer).decode(document.ids[document.loss_mask] if targets_only else document.ids)


@pytest.mark.parametrize(
    ("template", "adds_bos", "bos", "fronts"),
    [(LLAMA3, True, True, 1), (LLAMA3, False, True, 1), (WITHOUT_BOS, True, True, 1), (WITHOUT_BOS, False, False, 0)],
)
def test_exactly_one_bos_in_front_of_a_chat(template, adds_bos, bos, fronts):
    tokenizer = small_tokenizer(template, adds_bos=adds_bos, bos=bos)
    (document,) = one(encoder_of(tokenizer), chat("hi", "yo"))
    bos_id = tokenizer.convert_tokens_to_ids("<bos>")
    assert document.ids.tolist().count(bos_id) == fronts
    assert (document.ids[0] == bos_id) == bool(fronts)
    assert decoded(tokenizer, document, targets_only=True) == "yo<|eot_id|>"


def test_bos_never_and_always():
    tokenizer = small_tokenizer(WITHOUT_BOS, adds_bos=True)
    assert decoded(tokenizer, one(encoder_of(tokenizer, bos="never"), chat("a", "b"))[0]).startswith(
        "<|start_header_id|>"
    )
    silent = small_tokenizer(WITHOUT_BOS)
    assert decoded(silent, one(encoder_of(silent, bos="always"), chat("a", "b"))[0]).startswith("<bos><|start")
    with pytest.raises(DataError, match="no BOS token"):
        encoder_of(small_tokenizer(bos=False), bos="always")


def test_text_is_whole_between_bos_and_eos():
    tokenizer = small_tokenizer()
    (document,) = one(encoder_of(tokenizer), Text("ab"))
    assert decoded(tokenizer, document) == "<bos>ab<eos>"
    assert document.loss_mask.tolist() == [False, True, True, True]
    (bare,) = one(encoder_of(tokenizer, bos="never", eos="never"), Text("ab"))
    assert decoded(tokenizer, bare) == "ab"
    (marked,) = one(encoder_of(tokenizer), Text("<bos>ab"))
    assert decoded(tokenizer, marked) == "<bos>ab<eos>"


def test_prompt_and_completion_are_tokenised_apart():
    tokenizer = small_tokenizer(bos=False, merges=((":", "Ġ"), (":Ġ", "Y")))
    assert tokenizer.convert_ids_to_tokens(tokenizer("Q: Y").input_ids) == ["Q", ":ĠY"]
    (document,) = one(encoder_of(tokenizer), PromptCompletion("Q: ", "Y"))
    assert tokenizer.convert_ids_to_tokens(document.ids.tolist()) == ["Q", ":Ġ", "Y", "<eos>"]
    assert document.ids[:2].tolist() == tokenizer("Q: ").input_ids
    assert document.num_targets == 2 and document.loss_mask.tolist() == [False, False, True, True]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_prompt_ids_are_those_of_generation(adds_bos):
    tokenizer = small_tokenizer(adds_bos=adds_bos)
    (document,) = one(encoder_of(tokenizer), PromptCompletion("Q: ", " Y "))
    prompt = tokenizer("Q: ").input_ids
    assert document.ids[: len(prompt)].tolist() == prompt
    assert decoded(tokenizer, document, targets_only=True) == " Y <eos>"


def test_prompt_and_completion_as_message_lists():
    record = {
        "prompt": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        "completion": [{"role": "assistant", "content": "d"}],
    }
    tokenizer = small_tokenizer()
    (document,) = one(encoder_of(tokenizer), convert(record, "prompt_completion", lambda key: None))
    assert decoded(tokenizer, document, targets_only=True) == "d<|im_end|>"


def test_a_cut_that_leaves_no_target_is_a_bad_record():
    encoder = encoder_of(small_tokenizer(bos=False), "cut_right", limit=5)
    with pytest.raises(RecordFault) as caught:
        one(encoder, PromptCompletion("123456", "78"))
    assert caught.value.reason is Reason.NO_TARGET


def test_ids_and_mask_are_cut_alike_and_no_end_is_invented():
    tokenizer = small_tokenizer()
    whole = one(encoder_of(tokenizer), chat("hi", "a long answer"))[0]
    (cut,) = one(encoder_of(tokenizer, "cut_right", limit=len(whole) - 5), chat("hi", "a long answer"))
    assert cut.ids.tolist() == whole.ids[:-5].tolist()
    assert cut.loss_mask.tolist() == whole.loss_mask[:-5].tolist()
    assert not decoded(tokenizer, cut).endswith("<|im_end|>")


def test_text_is_split_without_loss():
    encoder = encoder_of(small_tokenizer(bos=False), "split", limit=4, eos="never")
    pieces = [piece for text in ("12345", "67", "890", "ab") for piece in one(encoder, Text(text))]
    assert [len(piece) for piece in pieces] == [4, 1, 2, 3, 2]
    assert pieces[0].tail_label == pieces[1].ids[0]
    assert [piece.tail_label for piece in pieces[1:]] == [-1] * 4


def test_cut_left_keeps_bos_and_the_newest():
    tokenizer = small_tokenizer()
    (cut,) = one(encoder_of(tokenizer, "cut_left", limit=4), Text("abcdef"))
    assert decoded(tokenizer, cut) == "<bos>ef<eos>"


def test_oldest_turns_are_dropped_and_the_system_message_stays():
    tokenizer = small_tokenizer()
    turns = [
        ("user", "q1"),
        ("assistant", "a1"),
        ("user", "q2"),
        ("assistant", "a2"),
        ("user", "q3"),
        ("assistant", "a3"),
    ]
    messages = [{"role": role, "content": content} for role, content in [("system", "S"), *turns]]
    sample = convert({"messages": messages}, "messages", lambda key: None)
    whole = one(encoder_of(tokenizer), sample)[0]
    encoder = encoder_of(tokenizer, "drop_oldest_turns", limit=len(whole) - 1)
    (left,) = one(encoder, sample)
    assert decoded(tokenizer, left) == decoded(tokenizer, whole).replace(
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n", ""
    )
    assert decoded(tokenizer, left, targets_only=True) == "a2<|im_end|>a3<|im_end|>"
    assert encoder.counts.documents_cut == 1 and encoder.counts.tokens_cut == len(whole) - len(left)
    with pytest.raises(RecordFault) as caught:
        one(encoder_of(tokenizer, "drop_oldest_turns", limit=8), sample)
    assert caught.value.reason is Reason.TOO_LONG


@pytest.mark.parametrize("policy", ["split", "cut_left"])
def test_policies_that_would_break_a_chat_are_refused(policy):
    with pytest.raises(DataError, match=policy):
        one(encoder_of(small_tokenizer(), policy), chat("a", "b"))


def test_an_id_beyond_the_model_is_named_with_both_sizes():
    tokenizer = small_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with pytest.raises(RecordFault) as caught:
        one(encoder_of(tokenizer, vocab_size=end), chat("a", "b"))
    assert caught.value.reason is Reason.ID_OUT_OF_RANGE
    for words in (f"token {end}", "<|im_end|>", f"model.vocab_size {end}", f"set model.vocab_size={len(tokenizer)}"):
        assert words in caught.value.message


def test_eos_ends_answers_of_a_template_without_end_only_on_demand():
    tokenizer = small_tokenizer(CHATML.replace("<|im_end|>", ""))
    silent, ended = encoder_of(tokenizer), encoder_of(tokenizer, eos="always")
    assert not decoded(tokenizer, one(silent, chat("a", "b"))[0]).endswith("<eos>")
    assert silent.counts.ended_turns == 0
    (document,) = one(ended, chat("a", "b"))
    assert decoded(tokenizer, document).endswith("<eos>") and document.loss_mask[-1]
    assert ended.counts.ended_turns == 1
    whole = small_tokenizer()
    assert "<eos>" not in decoded(whole, one(encoder_of(whole, eos="always"), chat("a", "b"))[0])


def test_a_chat_without_template_is_refused():
    with pytest.raises(DataError, match="tokenizer has no chat template"):
        one(encoder_of(small_tokenizer(None)), chat("a", "b"))


def test_a_trailing_question_is_kept_and_counted():
    tokenizer = small_tokenizer()
    encoder = encoder_of(tokenizer)
    (document,) = one(encoder, chat("a", "b", "c"))
    assert decoded(tokenizer, document, targets_only=True) == "b<|im_end|>"
    assert encoder.counts.trailing_unsupervised == 1


def test_a_chat_without_answers_has_nothing_to_learn():
    with pytest.raises(RecordFault) as caught:
        one(encoder_of(small_tokenizer()), chat("a"))
    assert caught.value.reason is Reason.NO_TARGET
