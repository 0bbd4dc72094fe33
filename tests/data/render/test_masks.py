"""Supervised text equals the assistant's texts and turn ends, or the record is refused: over templates of the field."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.config.schema import DataConfig
from freight.data.read.records import Reason, RecordFault
from freight.data.render.encode import EncodeCounts, SampleEncoder
from freight.data.render.formats import convert
from freight.data.render.masks import mask_tokens
from freight.data.render.messages import Conversation
from freight.data.render.spans import Span
from freight.data.render.template import load_chat_template
from freight.data.render.tokenizer import Encoder
from tests.data import small_tokenizer as styles
from tests.data.small_tokenizer import small_tokenizer

# Template, and what it renders for an assistant's content, turn end included.
STABLE = {
    "chatml": (styles.CHATML, lambda content: content + "<|im_end|>"),
    "chatml marked": (styles.CHATML_MARKED, lambda content: content + "<|im_end|>"),
    "end outside marks": (styles.CHATML_MARKED_WITHOUT_END, lambda content: content + "<|im_end|>"),
    "shipped chatml": ("chatml", lambda content: content + "<|im_end|>"),
    "shipped plain": ("plain", lambda content: " " + content + "<eos>"),
    "llama3": (styles.LLAMA3, lambda content: content.strip() + "<|eot_id|>"),
    "mistral": (styles.MISTRAL, lambda content: " " + content + "<eos>"),
    "rewriting marked": (styles.REWRITING_MARKED, lambda content: content + "<|im_end|>"),
}
ENCODERS = {}


def encoder_of(template: str, **options) -> SampleEncoder:
    tokenizer = small_tokenizer(template)
    config = DataConfig(train="-", sequence_length=1 << 20, **options)
    chosen = load_chat_template(tokenizer, template, {})
    return SampleEncoder(config, Encoder(tokenizer), chosen, "error", 1 << 20, EncodeCounts())


def messages_of(*turns: str) -> Conversation:
    """`u:text`, `a:text`, `s:text` as a conversation."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    messages = [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]
    sample = convert({"messages": messages}, "messages", lambda key: None)
    assert isinstance(sample, Conversation)
    return sample


def supervised(encoder: SampleEncoder, conversation: Conversation) -> list[str]:
    """Text of each run of targets."""
    (result,) = encoder.encode([conversation])
    if isinstance(result, RecordFault):
        raise result
    (document,) = result
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.loss_mask, [0]])))
    inner = Encoder(small_tokenizer())
    return [inner.decode(document.ids[start:stop]) for start, stop in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name", STABLE)
def test_every_answer_is_found_and_an_equal_question_is_not(name):
    template, rendered = STABLE[name]
    conversation = messages_of("s:S", "u:a", "a:b", "u:b", "a:b")
    assert supervised(encoder_of(template), conversation) == [rendered("b")] * 2


def test_the_other_spelling_of_a_chat_gives_the_same_mask():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "b"}]
    record = {"system": "S", "conversations": [*turns, {"from": "gpt", "value": "b"}]}
    encoder = encoder_of(styles.CHATML)
    (other,) = encoder.encode([convert(record, "conversations", lambda key: None)])
    (one,) = encoder.encode([messages_of("s:S", "u:a", "a:b", "u:b", "a:b")])
    assert other[0].ids.tolist() == one[0].ids.tolist()
    assert other[0].loss_mask.tolist() == one[0].loss_mask.tolist()


@pytest.mark.parametrize("name", STABLE)
def test_an_empty_answer_trains_its_end_only(name):
    template, rendered = STABLE[name]
    assert supervised(encoder_of(template), messages_of("u:a", "a:")) == [rendered("")]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SAID = st.sampled_from(["", "b", "<", "|", "assistant", "user\n", " x ", "\n", "é日"]) | TEXT


@settings(max_examples=120)
@given(
    name=st.sampled_from(sorted(STABLE)), turns=st.lists(st.tuples(SAID, SAID), min_size=1, max_size=3), data=st.data()
)
def test_supervised_text_is_the_answers_or_the_record_is_refused(name, turns, data):
    template, rendered = STABLE[name]
    system = data.draw(st.booleans())
    trailing = data.draw(st.booleans())
    said = [*(["s:be brief"] if system else []), *(t for q, a in turns for t in (f"u:{q}", f"a:{a}"))]
    conversation = messages_of(*said, *(["u:and?"] if trailing else []))
    if any("</think>" in answer for _, answer in turns):
        return
    encoder = ENCODERS.setdefault(name, encoder_of(template))
    try:
        found = supervised(encoder, conversation)
    except RecordFault as fault:
        assert fault.reason is Reason.UNSTABLE_TEMPLATE
        assert name == "rewriting marked" or any(special in "".join(said) for special in styles.SPECIAL)
        return
    assert found == [rendered(answer) for _, answer in turns]


REASONED = ("u:u1", "a:<think>x</think>A", "u:u2", "a:<think>y</think>B")


def test_a_template_that_rewrites_history_is_refused_at_its_turn():
    with pytest.raises(RecordFault) as caught:
        supervised(encoder_of(styles.REWRITING), messages_of(*REASONED))
    assert caught.value.reason is Reason.UNSTABLE_TEMPLATE
    assert "not prefix-stable at turn 2 (characters 52.." in caught.value.message
    assert "data.assistant_start" in caught.value.message


def test_a_prompt_that_is_not_what_precedes_the_answer_is_refused():
    thinking = styles.CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>' }}")
    with pytest.raises(RecordFault, match="not prefix-stable at turn 2"):
        supervised(encoder_of(thinking), messages_of("u:a", "a:b"))


def test_rewritten_history_is_learned_as_rendered_with_marks_or_delimiters():
    expected = ["A<|im_end|>", "<think>y</think>B<|im_end|>"]
    assert supervised(encoder_of(styles.REWRITING_MARKED), messages_of(*REASONED)) == expected
    delimited = encoder_of(styles.REWRITING, assistant_start="<|im_start|>assistant\n", assistant_end="<|im_end|>")
    assert supervised(delimited, messages_of(*REASONED)) == expected
    (whole,) = delimited.encode([messages_of(*REASONED)])
    assert Encoder(small_tokenizer()).decode(whole[0].ids).count("<think>") == 1


def test_only_the_last_answer_of_rewritten_history_needs_no_help():
    encoder = encoder_of(styles.REWRITING, train_on="last_assistant")
    assert supervised(encoder, messages_of(*REASONED)) == ["<think>y</think>B<|im_end|>"]


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        (("u:<|im_start|>assistant\nhi", *REASONED), "opens 3 spans for 2"),
        (("u:u1", "a:<think>x</think>A<|im_end|>A", *REASONED[2:]), "holds an assistant delimiter"),
    ],
)
def test_delimiters_in_the_texts_are_refused(turns, words):
    encoder = encoder_of(styles.REWRITING, assistant_start="<|im_start|>assistant\n", assistant_end="<|im_end|>")
    with pytest.raises(RecordFault, match=words):
        supervised(encoder, messages_of(*turns))


def test_a_template_that_drops_an_answer_is_refused():
    hiding = styles.CHATML_MARKED.replace("{{ m.content + '<|im_end|>' }}{% endgen", "{{ 'x<|im_end|>' }}{% endgen")
    with pytest.raises(RecordFault, match="do not decode"):
        supervised(encoder_of(hiding), messages_of("u:a", "a:hello"))


SAYING = "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (styles.CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'user'"), ("u:a", "a:b", "u:c", "a:d")),
        (styles.CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'user'"), ("u:a", "a:b", "u:c")),
        (styles.CHATML_MARKED.replace("m.role == 'assistant'", "loop.last"), ("u:a", "a:b", "u:c", "a:d")),
        (styles.CHATML_MARKED.replace(SAYING, SAYING.replace("m.content", "m.content[-1]")), ("u:a", "a:hello")),
        (styles.CHATML_MARKED.replace(SAYING, "{% generation %}<|im_end|>{% endgeneration %}"), ("u:a", "a:b")),
        (styles.CHATML_MARKED.replace(SAYING, SAYING * 2).replace("m.content + '", "m.content[0] + '"),
         ("u:a", "a:hello")),
    ],
    ids=["users", "users, another number", "last only", "last letter", "end only", "two blocks, first letters"],
)  # fmt: skip
def test_marks_around_something_else_than_the_answers_are_refused(template, turns):
    with pytest.raises(RecordFault) as caught:
        supervised(encoder_of(template), messages_of(*turns))
    assert caught.value.reason is Reason.UNSTABLE_TEMPLATE
    assert "decode" in caught.value.message


def test_several_marked_blocks_of_a_turn_are_its_text_together():
    halves = "{% generation %}{{ m.content[:2] }}{% endgeneration %}{% generation %}{{ m.content[2:] + '<|im_end|>' }}"
    template = styles.CHATML_MARKED.replace("{% generation %}{{ m.content + '<|im_end|>' }}", halves)
    assert supervised(encoder_of(template), messages_of("u:a", "a:hello", "u:a", "a:you")) == [
        "hello<|im_end|>",
        "you<|im_end|>",
    ]


def test_a_call_outside_the_marks_is_refused():
    outside = styles.CHATML_MARKED.replace(
        "{% endgeneration %}", "{% endgeneration %}{{ m.tool_calls[0].function.name }}"
    )
    call = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    sample = convert({"messages": [{"role": "user", "content": "a"}, call]}, "messages", lambda key: None)
    with pytest.raises(RecordFault, match="hold no call of 'add'"):
        supervised(encoder_of(outside), sample)


def test_reasoning_may_be_dropped_up_to_its_closing_tag_and_nothing_else():
    dropping = styles.CHATML_MARKED.replace(SAYING, SAYING.replace("m.content +", "m.content.split('WORD')[-1] +"))
    for word in ("</think>", "</seed:think>", "[/THINK]", "<|end_of_thought|>"):
        encoder = encoder_of(dropping.replace("WORD", word))
        assert supervised(encoder, messages_of("u:a", f"a:<think>x{word}yes")) == ["yes<|im_end|>"]
    with pytest.raises(RecordFault, match="do not decode"):
        supervised(encoder_of(dropping.replace("WORD", ",")), messages_of("u:a", "a:no, yes"))


def test_weights_switch_single_answers_off():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 0},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "weight": 1},
    ]
    sample = convert({"messages": messages}, "messages", lambda key: None)
    for template in (styles.CHATML, styles.CHATML_MARKED):
        assert supervised(encoder_of(template), sample) == ["d<|im_end|>"]
    everything_else = supervised(encoder_of(styles.CHATML, train_on="all"), sample)
    assert len(everything_else) == 2 and "b" not in everything_else[0].split("assistant")[-1]


def test_tool_calls_are_supervised_once_and_tool_results_are_not():
    arguments = ['{"a":1,"b":1}', {"a": 1, "b": 1}]
    contents = [{"content": None}, {}, {"content": ""}]
    answers = ["2", [{"type": "text", "text": "2"}]]
    encoder = encoder_of(styles.TOOLS)
    seen = set()
    for given_arguments in arguments:
        for content in contents:
            for answer in answers:
                messages = [
                    {"role": "user", "content": "1+1?"},
                    {
                        "role": "assistant",
                        **content,
                        "tool_calls": [{"function": {"name": "add", "arguments": given_arguments}}],
                    },
                    {"role": "tool", "content": "2"},
                    {"role": "assistant", "content": answer},
                ]
                sample = convert({"messages": messages}, "messages", lambda key: None)
                (documents,) = encoder.encode([sample])
                text = Encoder(small_tokenizer()).decode(documents[0].ids)
                assert "None" not in text and "null" not in text and text.count("<|im_start|>") == 4
                seen.add((text, *supervised(encoder, sample)))
    ((_, call, answer),) = seen
    assert call == '<call>add{"a": 1, "b": 1}</call><|im_end|>' and answer == "2<|im_end|>"


def test_a_template_without_tools_refuses_them():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    sample = convert({"messages": [{"role": "user", "content": "a"}, call]}, "messages", lambda key: None)
    with pytest.raises(RecordFault, match="renders no tool calls"):
        supervised(encoder_of(styles.CHATML), sample)
    with pytest.raises(RecordFault, match="renders no tools"):
        tools = [{"type": "function", "function": {"name": "f"}}]
        record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": tools}
        supervised(encoder_of(styles.CHATML), convert(record, "messages", lambda key: None))


THINKING = styles.CHATML.replace(
    "m.content + '<|im_end|>\n'", "('<think>' + m.WORD + '</think>' if m.WORD else '') + m.content + '<|im_end|>\n'"
)


@pytest.mark.parametrize("spelling", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_learned_where_the_template_writes_it_and_refused_where_not(spelling):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", spelling: "x"}]
    sample = convert({"messages": messages}, "messages", lambda key: None)
    for word in ("reasoning_content", "reasoning", "thinking"):
        assert supervised(encoder_of(THINKING.replace("WORD", word)), sample) == ["<think>x</think>b<|im_end|>"]
    with pytest.raises(RecordFault, match="renders no reasoning") as caught:
        supervised(encoder_of(styles.CHATML), sample)
    assert caught.value.reason is Reason.TEMPLATE_ERROR
    assert caught.value.field == "messages[1].reasoning_content"


def test_two_spellings_of_reasoning_that_disagree_are_a_fault():
    one = {"role": "assistant", "content": "b", "reasoning": "x"}
    assert convert({"messages": [{**one, "thinking": "x"}]}, "messages", lambda key: None)
    with pytest.raises(RecordFault, match="keep one of the two"):
        convert({"messages": [{**one, "thinking": "y"}]}, "messages", lambda key: None)


def test_a_token_across_the_border_is_supervised_and_counted():
    tokenizer = small_tokenizer(merges=(("Ċ", "b"),))
    text = "<|im_start|>assistant\nbc<|im_end|>\n"
    (encoded,) = Encoder(tokenizer).encode([text])
    start = text.index("bc")
    mask = mask_tokens(text, encoded, [Span(start, len(text), 1)], Encoder(tokenizer).special_ids)
    (straddling,) = mask.straddling
    assert text[encoded.starts[straddling] : encoded.stops[straddling]] == "\nb"
    assert [text[a:b] for a, b, on in zip(encoded.starts, encoded.stops, mask.targets, strict=True) if on] == [
        "\nb",
        "c",
        "<|im_end|>",
    ]


def test_an_empty_span_inside_a_token_supervises_nothing():
    tokenizer = small_tokenizer(merges=(("Ċ", "Ċ"),))
    (encoded,) = Encoder(tokenizer).encode(["a\n\nb"])
    assert encoded.starts.tolist() == [0, 1, 3]
    assert not mask_tokens("a\n\nb", encoded, [Span(2, 2, 1)], Encoder(tokenizer).special_ids).targets.any()


def test_all_tokens_are_learned_on_demand():
    (documents,) = encoder_of(styles.CHATML, train_on="all").encode([messages_of("u:a", "a:b")])
    mask = documents[0].loss_mask
    assert not mask[0] and mask[1:-1].all()
