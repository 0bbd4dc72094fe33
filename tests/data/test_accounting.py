"""From a file to documents under each policy: what is cut, dropped or refused has its place and its number."""

import json

import pytest

from freight.config.schema import DataConfig
from freight.data.read.records import Reason
from freight.data.render.tokenizer import Encoder
from freight.data.tokens.tokenise import tokenise
from freight.errors import DataError
from tests.data.small_tokenizer import CHATML, small_tokenizer

BARE = small_tokenizer(bos=False)
CHAT = small_tokenizer(CHATML, bos=False)


def write(path, *records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


def run(source, folder=None, tokenizer=BARE, vocab_size=1 << 20, **options):
    config = DataConfig(**{"train": source, "sequence_length": 256, "cache_dir": None, **options})
    return tokenise(source, config, tokenizer, vocab_size=vocab_size, output_dir=folder)


def rejects_of(folder):
    return [json.loads(line) for line in (folder / "rejects-d.jsonl").read_bytes().splitlines()]


def pair(prompt, completion):
    return {"prompt": prompt, "completion": completion}


SKIP = {"on_bad_record": "skip", "max_skipped_fraction": 1.0}


def test_an_answer_cut_off_whole_is_named_with_file_and_line_or_counted(tmp_path):
    source = write(tmp_path / "d.jsonl", pair("1", "2"), pair("123456", "78"))
    options = {"sequence_length": 5, "truncation": "cut_right", "eos": "never"}
    with pytest.raises(DataError, match=r"d\.jsonl:2: no supervised token is left of 8 after cut_right to 5"):
        run(source, **options)
    documents = run(source, tmp_path, **options, **SKIP)
    assert len(documents) == 1 and documents.metadata["skipped"] == {"no_target": 1}
    (reject,) = rejects_of(tmp_path)
    assert (reject["line"], reject["reason"]) == (2, "no_target")


def test_what_long_documents_lose_is_counted_by_policy(tmp_path):
    source = write(tmp_path / "d.jsonl", pair("12", "345"), pair("6", "7"))
    options = {"sequence_length": 4, "eos": "never"}
    with pytest.raises(DataError, match=r"d\.jsonl:1: 5 tokens > data\.sequence_length 4 \(1 of the first 2 records"):
        run(source, **options)
    dropped = run(source, tmp_path, truncation="drop", **options)
    assert (len(dropped), dropped.metadata["tokens_dropped"], dropped.metadata["tokens_cut"]) == (1, 5, 0)
    assert dropped.metadata["skipped"] == {"too_long": 1} and rejects_of(tmp_path)[0]["line"] == 1
    cut = run(source, truncation="cut_right", **options)
    assert (cut.metadata["documents_cut"], cut.metadata["tokens_cut"], cut.metadata["tokens_dropped"]) == (1, 1, 0)
    assert Encoder(BARE).decode(cut[0].ids) == "1234" and cut[0].loss_mask.tolist() == [False, False, True, True]
    assert cut[0].labels().tolist()[-1] == -100


def test_an_end_stands_at_the_end_of_a_text_and_at_no_cut(tmp_path):
    source = write(tmp_path / "d.jsonl", {"text": "12345"})
    decode = Encoder(BARE).decode
    pieces = run(source, sequence_length=4)
    assert [decode(pieces[index].ids) for index in range(len(pieces))] == ["1234", "5<eos>"]
    assert [decode(run(source, sequence_length=4, truncation=how)[0].ids) for how in ("cut_right", "cut_left")] == [
        "1234",
        "345<eos>",
    ]


def test_a_default_system_prompt_stands_there_once(tmp_path):
    template = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good<|im_end|>\n{% endif %}" + CHATML
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b")) * 2]
    documents = run(write(tmp_path / "d.jsonl", {"messages": turns}), tokenizer=CHAT, chat_template=template)
    encoder = Encoder(CHAT)
    assert encoder.decode(documents[0].ids).count("Be good") == 1
    assert encoder.decode(documents[0].ids[documents[0].loss_mask]) == "b<|im_end|>" * 2


def test_a_developer_is_a_system_to_a_template_that_does_not_know_the_word(tmp_path):
    turns = [{"role": role, "content": "x"} for role in ("developer", "user", "assistant")]
    source = write(tmp_path / "d.jsonl", {"messages": turns})
    for template, role in ((CHATML, "system"), (CHATML + "{# developer #}", "developer")):
        text = Encoder(CHAT).decode(run(source, tokenizer=CHAT, chat_template=template)[0].ids)
        assert text.startswith(f"<|im_start|>{role}\nx")


def test_every_packed_document_has_its_own_bos(tmp_path):
    tokenizer = small_tokenizer()
    documents = run(
        write(tmp_path / "d.jsonl", *({"text": text} for text in ("a", "bb", "<bos>c"))), tokenizer=tokenizer
    )
    bos = tokenizer.convert_tokens_to_ids("<bos>")
    assert [(ids := documents[index].ids.tolist()).count(bos) == 1 and ids[0] == bos for index in range(3)] == [
        True
    ] * 3


def test_an_id_above_the_model_stops_before_any_step_with_both_sizes(tmp_path):
    tokenizer = small_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError) as caught:
        run(write(tmp_path / "d.jsonl", {"messages": turns}), tokenizer=tokenizer, vocab_size=end)
    for words in ("d.jsonl:1", f"token {end}", f"model.vocab_size {end}", f"model.vocab_size={len(tokenizer)}"):
        assert words in str(caught.value)


def messages(*turns):
    return {"messages": [{"role": "user", "content": "q"}, *turns]}


def answer(**more):
    return {"role": "assistant", "content": "a", **more}


UNFIT = {
    Reason.INVALID_JSON: b'{"messages":',
    Reason.INVALID_UTF8: b'{"messages": "\xff"}',
    Reason.NOT_AN_OBJECT: b"[1]",
    Reason.DUPLICATE_KEY: b'{"messages": [], "messages": []}',
    Reason.MISSING_FIELD: {"text": "a"},
    Reason.WRONG_TYPE: messages(answer(content=5)),
    Reason.UNKNOWN_ROLE: messages(answer(role="critic")),
    Reason.BAD_TOOL_CALL: messages(answer(tool_calls=[5])),
    Reason.UNSUPPORTED_PART: messages(answer(content=[{"type": "image"}])),
    Reason.EMPTY: {"messages": []},
    Reason.TEMPLATE_ERROR: messages(answer(content="raise"), answer()),
    Reason.UNSTABLE_TEMPLATE: messages(answer(content="rewrite"), answer()),
    Reason.NO_TARGET: messages(answer(weight=0)),
    Reason.TOO_LONG: messages(answer(content="x" * 300)),
    Reason.ID_OUT_OF_RANGE: messages(answer(content="<|eot_id|>")),
}
FRAGILE = (
    "{% if messages | length > 2 and messages[1].content == 'raise' %}{{ raise_exception('no') }}{% endif %}"
    "{% if messages | length > 2 and messages[1].content == 'rewrite' %}!{% endif %}"
) + CHATML.replace("{% endfor %}", "{# tool_calls #}{% endfor %}", 1)


def test_each_reason_for_leaving_a_record_out_is_counted_and_written(tmp_path):
    assert set(UNFIT) == set(Reason)
    good = json.dumps(messages(answer())).encode()
    lines = [bad if isinstance(bad, bytes) else json.dumps(bad).encode() for bad in UNFIT.values()]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join([good, *lines, good]))
    documents = run(
        str(tmp_path / "d.jsonl"),
        tmp_path,
        CHAT,
        CHAT.convert_tokens_to_ids("<|eot_id|>"),
        format="messages",
        chat_template=FRAGILE,
        truncation="drop",
        **SKIP,
    )
    metadata = documents.metadata
    assert metadata["skipped"] == {str(reason): 1 for reason in Reason}
    assert metadata["records_read"] == 2 + len(Reason) and metadata["records_used"] == 2
    rejects = rejects_of(tmp_path)
    assert [reject["reason"] for reject in rejects] == [str(reason) for reason in UNFIT]
    assert [reject["line"] for reject in rejects] == list(range(2, 2 + len(Reason)))
    assert all(reject["file"] == str(tmp_path / "d.jsonl") and reject["message"] for reject in rejects)


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.TOO_LONG])
def test_each_of_them_stops_the_run_unless_skipped(tmp_path, reason):
    bad = UNFIT[reason]
    line = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    (tmp_path / "d.jsonl").write_bytes(json.dumps(messages(answer())).encode() + b"\n" + line)
    with pytest.raises(DataError, match=r"d\.jsonl:2: .*; fix the record or set data\.on_bad_record=skip"):
        run(
            str(tmp_path / "d.jsonl"),
            tokenizer=CHAT,
            vocab_size=CHAT.convert_tokens_to_ids("<|eot_id|>"),
            format="messages",
            chat_template=FRAGILE,
        )
