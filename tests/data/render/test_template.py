"""Templates run in bounds, write what transformers' own renderer writes, and say what is wrong with them."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from freight.data.read.records import Reason, RecordFault
from freight.data.render.sandbox import START
from freight.data.render.template import ChatTemplate
from freight.errors import DataError
from tests.data import small_tokenizer as styles

TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def doubling(start, step):
    return f"{{% set n = namespace(s={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}"


CONSTRUCTS = (
    "{% macro f(x, y='!') %}{{ x | trim ~ y }}{% endmacro %}{% set names = ['a', 'b'] + ['c'] %}"
    "{% for m in messages if m.role != 'system' %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ f(m.content) ~ loop.index0 ~ (loop.last | string) ~ m.get('name', 'none') }}"
    "{% if m.content | length > 3 %}{% continue %}{% endif %}{% set kept %}{{ m.content.upper() }}{% endset %}"
    "{{ kept | replace('A', 'b') + '%s-%d' % (m.role, 3) + '=' * 3 }}{{ {'k': m.content} | tojson(indent=1) }}"
    "{% endfor %}{{ names | join(',') }}{% if tools is not none %}{{ tools | tojson }}{% endif %}"
    "{{ messages[0]['content'].split('a')[-1] }}{{ messages[1:] | length ** 2 }}{{ undefined_thing }}"
)


def template(text, **kwargs):
    return ChatTemplate(text, TOKENS, kwargs)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}", "steps; it may be endless"),
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "steps; it may be endless"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "it may be endless"),
        (doubling("'x'", "{% set n.s = n.s + n.s %}"), "characters or items"),
        (doubling("'x'", "{% set n.s = n.s ~ n.s %}"), "characters or items"),
        (doubling("'x'", "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}"), "characters or items"),
        (doubling("[1]", "{% set n.s = n.s + n.s %}"), "characters or items"),
        (doubling("'xx'", "{% set n.s = n.s.replace('x', n.s) %}"), "characters or items"),
        (doubling("'xx'", "{% set n.s = n.s | replace('x', n.s) %}"), "characters or items"),
        (doubling("3", "{% set n.s = n.s * n.s %}"), "bits"),
        ("{{ (messages | length + 8) ** 999999999 }}", "bits"),
        ("{{ 'x' * 99999999999 }}", "characters or items"),
        ("{{ [0] * 99999999999 }}", "characters or items"),
        ("{{ '%99999999999d' % 1 }}", "a format"),
        ("{{ '{:>99999999999}'.format('x') }}", "a format"),
        ("{{ 'x' | center(99999999999) }}", "characters or items"),
        ("{{ 'x'.ljust(99999999999) }}", "characters or items"),
        ("{% for a in range(9000) %}" + "x" * 1000 + "{% endfor %}", "a text of more than"),
    ],
)
def test_a_template_that_does_too_much_stops_the_run_at_once(text, words):
    with pytest.raises(DataError, match="the chat template does too much for one conversation") as caught:
        template(text)
    assert words in str(caught.value)


def test_what_a_template_may_do_grows_with_the_chat():
    spelled = template("{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}")
    assert spelled.render([{"role": "user", "content": "ab" * 100_000}]) == "ab" * 100_000
    doubled = template("{{ messages[0].content * 2 }}")
    assert len(doubled.render([{"role": "user", "content": "a" * 3_000_000}])) == 6_000_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for m in messages %}\n{{ m.content }", "syntax error in line 2"),
        ("{{ messages | frobnicate }}", "syntax error in line 1: No filter named 'frobnicate'"),
        ("{% generation %}a", "syntax error"),
        ("a{% endgeneration %}", "syntax error"),
        ("{% break %}", "cannot be compiled"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "cannot be compiled"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_named_before_any_record(text, words):
    with pytest.raises(DataError, match="the chat template") as caught:
        template(text)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ raise_exception('one\nturn only') }}", "the chat template says: one turn only"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ nothing() }}", "undefined"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ range(10 ** 9) }}", "too big"),
        ("{{ messages.append(1) }}", "says"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "takes no attribute"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_fails_makes_a_bad_record_with_its_words(text, words):
    with pytest.raises(RecordFault) as caught:
        template(text).render(CHAT)
    assert caught.value.reason is Reason.TEMPLATE_ERROR
    assert words in caught.value.message and "\n" not in caught.value.message


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["aXa", " a ", "{{ x }}", "<b>&"]
)


@settings(max_examples=80)
@given(
    text=st.sampled_from(
        [
            styles.CHATML,
            styles.CHATML_MARKED,
            styles.CHATML_MARKED_WITHOUT_END,
            styles.LLAMA3,
            styles.MISTRAL,
            styles.REWRITING,
            styles.REWRITING_MARKED,
            styles.TOOLS,
            CONSTRUCTS,
        ]
    ),
    turns=st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), TEXTS), min_size=1, max_size=4),
    tools=st.sampled_from([None, [{"name": "é<f>"}]]),
    prompt=st.booleans(),
)
def test_renders_and_spans_are_those_of_transformers(text, turns, tools, prompt):
    messages = [{"role": role, "content": content} for role, content in turns]
    ours = template(text)
    common = {"conversations": [messages], "tools": tools, "chat_template": text, **TOKENS}
    theirs, _ = render_jinja_template(add_generation_prompt=prompt, **common)
    assert ours.render(messages, tools, add_generation_prompt=prompt) == theirs[0]
    if ours.has_generation:
        theirs, spans = render_jinja_template(return_assistant_tokens_mask=True, **common)
        assert ours.render_spans(messages, tools) == (theirs[0], [tuple(span) for span in spans[0]])


@pytest.mark.parametrize(
    "text",
    [
        "{% macro f(m) %}{% generation %}{{ m.content }} {% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ f(m) | trim }}{% endfor %}",
        "{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}",
        "{% for m in messages %}{% generation %}a{% break %}{% endgeneration %}{% endfor %}",
    ],
)
def test_marks_that_do_not_say_what_is_the_assistants_are_refused(text):
    with pytest.raises(RecordFault) as caught:
        template(text).render_spans(CHAT)
    assert caught.value.reason is Reason.UNSTABLE_TEMPLATE


def test_marks_kept_for_later_and_written_as_they_are_are_found():
    text = (
        "{% for m in messages %}{% set kept %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}"
        "{{ kept }};{% endfor %}"
    )
    assert template(text).render_spans(CHAT) == ("a;b;", [(0, 1), (2, 3)])
    assert START not in template(text).render(CHAT)


def test_a_template_travels_between_processes_and_keeps_its_hash():
    one = template(styles.CHATML_MARKED + "{# mood #}", mood=1)
    other = pickle.loads(pickle.dumps(one))
    assert other.hash == one.hash != template(styles.CHATML_MARKED + "{# mood #}").hash
    assert other.render_spans(CHAT) == one.render_spans(CHAT)
