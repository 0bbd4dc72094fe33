"""A document as coloured tokens: what is learned, and what is only read.

Gives rich text; printing is the command line's business. Targets are green between ⟦ and ⟧, so that the mask shows
without colour too; tokens alternate in brightness so that their borders show, and white space is made visible.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from freight.data.documents import NO_TAIL, Document

TARGET_STYLES = ("green", "bold green")
CONTEXT_STYLES = ("dim", "none")
LONGEST_CHARACTER = 4
VISIBLE = {"\n": "⏎\n", "\t": "⇥   ", "\r": "␍"}


def show_document(document: Document, tokenizer: PreTrainedTokenizerBase | None, *, ids: bool = False) -> Text:
    """One document, token by token.

    Args:
        document: From `tokenise` or a packed file.
        tokenizer: Gives each token's text; None shows ids only.
        ids: Put each token's id behind its text.
    """
    numbers = document.ids.tolist()
    words = token_texts(numbers, tokenizer) if tokenizer else [""] * len(numbers)
    text = Text()
    inside = False
    for index, (number, word, target) in enumerate(zip(numbers, words, document.loss_mask.tolist(), strict=True)):
        if target != inside:
            text.append("⟦" if target else "⟧", TARGET_STYLES[0])
            inside = target
        style = (TARGET_STYLES if target else CONTEXT_STYLES)[index % 2]
        if not ids and tokenizer:
            text.append(word, style)
            continue
        line_end = "\n" if word.endswith("\n") else ""
        text.append(word.removesuffix("\n"), style)
        text.append(f"·{number} {line_end}", f"{style} italic")
    text.append("⟧" if inside else "", TARGET_STYLES[0])
    if document.tail_label != NO_TAIL:
        follows = token_texts([document.tail_label], tokenizer)[0] if tokenizer else str(document.tail_label)
        text.append(f" → ⟦{follows}⟧", TARGET_STYLES[0])
    return text


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Printable text of each token; joined, the decoded whole.

    Each token is decoded behind the one before, since some tokenizers drop a space at the start of a text. A token
    that holds only a part of a character shows nothing; the token that completes it shows the character.
    """
    texts: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        piece = decode([*before, *pending], tokenizer).removeprefix(decode(before, tokenizer))
        if piece.endswith("\ufffd") and len(pending) < LONGEST_CHARACTER:
            texts.append("")
            continue
        before, pending = pending, []
        texts.append(visible(piece))
    return texts


def decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of ids, special tokens included."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if ids else ""


def visible(text: str) -> str:
    """White space and control characters made visible; line feeds still break lines."""
    return "".join(VISIBLE.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in text)
