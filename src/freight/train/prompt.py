"""From text or a conversation to the ids a model continues, and from its new ids back to text, piece by piece.

Uses the chat template and tokeniser of training, so that a prompt looks to the model like what it was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from transformers import PreTrainedTokenizerBase

from freight.data.read.records import RecordFault
from freight.data.read.strict_json import StrictDecoder
from freight.data.render.formats import convert
from freight.data.render.messages import Conversation, for_template
from freight.data.render.template import ChatTemplate
from freight.data.render.tokenizer import Encoder
from freight.errors import DataError

REPLACEMENT = "\ufffd"


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a plain text to be continued, with the BOS that the tokenizer puts in front; no EOS behind."""
    return _with_bos(Encoder(tokenizer), text)


def read_chat(text: str, ignored: Callable[[str], None]) -> Conversation:
    """A conversation to be continued, by the same rules as a record of training.

    Args:
        text: JSON: a record with `messages` or `conversations`, or a list of messages; of several lines, the first.
        ignored: Told of keys that are not used.

    Raises:
        DataError: It is none.
    """
    decoder = StrictDecoder()
    try:
        try:
            record = decoder.decode(text)
        except RecordFault:
            record = decoder.decode(text.strip().split("\n", 1)[0])
        if isinstance(record, list):
            record = {"messages": record}
        if isinstance(record, dict):
            chosen = next((name for name in ("messages", "conversations") if name in record), None)
            if chosen is not None:
                sample = convert(record, chosen, ignored)
                assert isinstance(sample, Conversation)
                return sample
    except RecordFault as fault:
        raise DataError(f"{fault}. Write the chat as a record of training.") from None
    raise DataError('no `messages`. Write {"messages": [{"role": "user", "content": "Hello"}]}.')


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None, conversation: Conversation
) -> list[int]:
    """Ids of a conversation up to where the assistant speaks next; rendered whole and tokenised once.

    Args:
        tokenizer: Of the model.
        template: From `load_chat_template`.
        conversation: From `read_chat`; the last message is usually the user's.

    Raises:
        DataError: No template, or the template refuses the messages, or would leave out what they hold.
    """
    if template is None:
        raise DataError("the tokenizer has no chat template; set `data.chat_template`, or use --prompt for plain text.")
    try:
        shown = for_template(conversation, template.mentions)
        text = template.render(shown.messages, shown.tools, add_generation_prompt=True)
    except RecordFault as fault:
        raise DataError(f"these messages cannot be rendered: {fault}") from None
    return _with_bos(Encoder(tokenizer), text)


def stop_ids(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None = None) -> frozenset[int]:
    """Tokens that end a text: EOS, and the one that closes an assistant's turn in the template."""
    encoder = Encoder(tokenizer)
    found = {encoder.eos_id, None if template is None else _turn_end(encoder, template)}
    return frozenset(i for i in found if i is not None)


def _turn_end(encoder: Encoder, template: ChatTemplate) -> int | None:
    """The first special token after an answer; None if the template marks no end, or rewrites what it rendered."""
    question = {"role": "user", "content": "a"}
    try:
        before = template.render([question], add_generation_prompt=True)
        whole = template.render([question, {"role": "assistant", "content": "b"}])
    except RecordFault:
        return None
    answer = encoder.encode([whole.removeprefix(before) if whole.startswith(before) else ""])[0].ids
    return next((int(i) for i in answer if i in encoder.special_ids), None)


def stream_text(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> Iterator[str]:
    """Pieces of text as ids come in; joined, exactly the decoded whole without special tokens.

    A piece is held back while it may end inside a character: byte-level tokens can be parts of one. Decoding starts
    over at the last piece shown, so a long text costs no more per token than a short one.
    """
    recent: list[int] = []
    shown = ""
    for token in ids:
        recent.append(token)
        text = _decode(tokenizer, recent)
        if text.endswith(REPLACEMENT):
            continue
        if len(text) > len(shown):
            yield text[len(shown) :]
            # The last token stays: what a tokenizer does at the start of a text must not happen in its middle.
            recent, shown = [token], _decode(tokenizer, [token])
    rest = _decode(tokenizer, recent)
    if len(rest) > len(shown):
        yield rest[len(shown) :]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _with_bos(encoder: Encoder, text: str) -> list[int]:
    """The text's ids, with exactly one BOS in front if the tokenizer itself would add one."""
    ids = [int(i) for i in encoder.encode([text])[0].ids]
    bos = encoder.bos_id
    return [bos, *ids] if bos is not None and bos in encoder.front_ids and ids[:1] != [bos] else ids
