from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from freight.data.documents import make_document
from freight.data.load.show import show_document, token_texts
from tests.data.small_tokenizer import small_tokenizer

TOKENIZER = small_tokenizer()


def document(text, targets):
    ids = TOKENIZER(text).input_ids
    return make_document(ids, [index in targets for index in range(len(ids))])


def test_targets_stand_in_brackets_and_white_space_shows():
    shown = show_document(document("a\tb\nc<eos>", range(2, 6)), TOKENIZER)
    assert shown.plain == "a⇥   ⟦b⏎\nc<eos>⟧"
    greens = {shown.plain[span.start : span.end] for span in shown.spans if "green" in str(span.style)}
    assert {"b", "c", "<eos>"} <= greens and "a" not in greens


def test_ids_and_the_label_of_a_cut_end():
    piece = make_document(TOKENIZER("abc").input_ids, [True] * 3).piece(0, 2)
    assert show_document(piece, TOKENIZER).plain == "a⟦b⟧ → ⟦c⟧"
    a, b, c = TOKENIZER("abc").input_ids
    assert show_document(piece, TOKENIZER, ids=True).plain == f"a·{a} ⟦b·{b} ⟧ → ⟦c⟧"
    assert show_document(piece, None).plain == f"·{a} ⟦·{b} ⟧ → ⟦{c}⟧"


def test_an_id_stands_behind_its_token_and_before_the_line_ends():
    a, feed, b = TOKENIZER("a\nb").input_ids
    assert show_document(document("a\nb", ()), TOKENIZER, ids=True).plain == f"a·{a} ⏎·{feed} \nb·{b} "


def test_characters_of_several_tokens_show_once():
    ids = TOKENIZER("é日x").input_ids
    assert token_texts(ids, TOKENIZER) == ["", "é", "", "", "日", "x"]
    assert token_texts(TOKENIZER("\x07").input_ids, TOKENIZER) == ["\\x07"]


def test_spaces_that_a_decoder_adds_between_words_show():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert token_texts([0, 1, 0], PreTrainedTokenizerFast(tokenizer_object=words)) == ["a", " b", " a"]
