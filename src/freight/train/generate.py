"""Text from a model, token by token: for looking at what it learned, not for serving.

One sequence, one token per forward, keys and values cached. Greedy at temperature 0; otherwise drawn from the smallest
set of tokens whose probability reaches top-p, by a generator of its own: equal seeds give equal texts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from freight.errors import ConfigError, DataError
from freight.nn.decode import decoding
from freight.nn.decoder import Decoder


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
            f"{len(prompt_ids)} prompt tokens + `--max-tokens` {max_tokens} exceed the model's {positions} positions; "
            f"{fix}."
        )
    if faults:
        raise ConfigError(*faults)
    if not len(prompt_ids):
        raise DataError("the prompt has no tokens; give at least one word.")
    if bad := [i for i in prompt_ids if not 0 <= i < model.arch.vocab_size]:
        raise DataError(
            f"prompt token {bad[0]} is outside the model's vocabulary of {model.arch.vocab_size}; "
            "use the tokenizer that belongs to the model."
        )
