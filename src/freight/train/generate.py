"""Text from a model, token by token: for looking at what it learned, not for serving.

One sequence, one token per forward, keys and values cached. Greedy at temperature 0; otherwise drawn from the smallest
set of tokens whose probability reaches top-p, by a generator of its own: equal seeds give equal texts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from freight.errors import ConfigError, DataError
from freight.nn.decode import decoding
from freight.nn.decoder import Decoder

REPLACEMENT = "\ufffd"


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """Continue a prompt; ids come as soon as they are chosen.

    Args:
        model: The model; its mode and runners are restored when the iterator ends or is closed.
        prompt_ids: At least one token.
        max_tokens: Most new tokens.
        temperature: Logits are divided by it; 0 = always the most likely token (the lowest id among equals).
        top_p: Share of probability to draw from, in (0, 1].
        seed: Of the draws.
        stop_ids: A token that ends the text; it is not yielded.

    Raises:
        ConfigError: A value out of its range, or more tokens than the model has positions.
        DataError: An empty prompt, or a token that the vocabulary does not have.
    """
    _check(model, prompt_ids, max_tokens, temperature, top_p)
    return _generate(model, prompt_ids, max_tokens, temperature, top_p, seed, frozenset(stop_ids))


def _generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    stop_ids: frozenset[int],
) -> Iterator[int]:
    draws = torch.Generator().manual_seed(seed)
    with decoding(model, len(prompt_ids) + max_tokens) as next_logits:
        new: Sequence[int] = prompt_ids
        for _ in range(max_tokens):
            chosen = choose_token(next_logits(new), temperature, top_p, draws)
            if chosen in stop_ids:
                return
            yield chosen
            new = (chosen,)


def choose_token(logits: Tensor, temperature: float, top_p: float, draws: torch.Generator) -> int:
    """Pick the next token.

    Args:
        logits: `[vocab]`.
        temperature: 0 = the most likely token.
        top_p: Tokens are taken from the most likely down until their probability reaches it; the one that reaches it
            still counts.
        draws: On CPU, so that a seed means the same on every device.
    """
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = (logits.double().cpu() / temperature).softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities * (before < top_p)
    place = torch.searchsorted(
        kept.cumsum(-1), kept.sum() * torch.rand((), dtype=torch.float64, generator=draws), right=True
    )
    return int(order[min(int(place), int((kept > 0).sum()) - 1)])


def _check(model: Decoder, prompt_ids: Sequence[int], max_tokens: int, temperature: float, top_p: float) -> None:
    faults = []
    if max_tokens < 1:
        faults.append(f"`--max-tokens` must be at least 1; got {max_tokens}.")
    if not temperature >= 0:
        faults.append(f"`--temperature` must be 0 (always the most likely token) or more; got {temperature}.")
    if not 0 < top_p <= 1:
        faults.append(f"`--top-p` must lie in (0, 1]; got {top_p}. 1 draws from all tokens.")
    positions = model.arch.max_position_embeddings
    if len(prompt_ids) + max_tokens > positions:
        room = positions - len(prompt_ids)
        fix = f"use --max-tokens {room}" if room > 0 else "shorten the prompt"
        faults.append(
            f"{len(prompt_ids)} prompt tokens + `--max-tokens` {max_tokens} exceed the model's {positions} positions; {fix}."
        )
    if faults:
        raise ConfigError(*faults)
    if not len(prompt_ids):
        raise DataError("the prompt has no tokens; give at least one word.")
    if bad := [i for i in prompt_ids if not 0 <= i < model.arch.vocab_size]:
        raise DataError(
            f"prompt token {bad[0]} is outside the model's vocabulary of {model.arch.vocab_size}; use its own tokenizer."
        )


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a plain text to be continued, with the BOS that the tokenizer puts in front; no EOS behind."""
    return _with_bos(tokenizer, text)


def chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    **template_kwargs: Any,
) -> list[int]:
    """Ids of a conversation up to where the assistant speaks next; rendered whole and tokenised once.

    Args:
        tokenizer: Of the model.
        messages: `[{role, content}]`; the last is usually the user's.
        chat_template: Jinja text; the tokenizer's own by default.
        **template_kwargs: For the template, `tools` among them.

    Raises:
        DataError: No template, or the template refuses the messages.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise DataError("tokenizer has no chat template; set `data.chat_template`, or use --prompt for plain text.")
    options: dict[str, Any] = {"chat_template": chat_template, **template_kwargs}
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **options
        )
    except Exception as error:  # a template raises whatever it likes
        raise DataError(f"the chat template refuses these messages: {error}") from None
    return _with_bos(tokenizer, str(text))


def _with_bos(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The text's ids, with exactly one BOS in front if the tokenizer itself would add one."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    front: list[int] = tokenizer("a", add_special_tokens=True)["input_ids"]  # pyright: ignore[reportAssignmentType]
    bos = tokenizer.bos_token_id
    adds = isinstance(bos, int) and front[:1] == [bos]
    return [bos, *ids] if adds and ids[:1] != [bos] else ids


def stream_text(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> Iterator[str]:
    """Pieces of text as ids come in, together exactly the decoded whole.

    A piece is held back while it may end inside a character: byte-level tokens can be parts of one.
    """
    seen: list[int] = []
    shown = ""
    for token in ids:
        seen.append(token)
        text = str(tokenizer.decode(seen, skip_special_tokens=True))
        if not text.endswith(REPLACEMENT) and text.startswith(shown):
            if len(text) > len(shown):
                yield text[len(shown) :]
            shown = text
    text = str(tokenizer.decode(seen, skip_special_tokens=True))
    if len(text) > len(shown):
        yield text[len(shown) :]
