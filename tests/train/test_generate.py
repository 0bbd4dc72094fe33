"""Generated ids against a full forward for every token; draws against the distribution they come from."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import ConfigError, DataError
from freight.nn.block import PlainRunner
from freight.nn.decoder import Decoder
from freight.nn.loss_head import LogitsHead
from freight.ops.batch import TokenBatch
from freight.train.generate import choose_token, generate
from tests.nn.small_decoders import VARIANTS, build

PROMPT = [1, 5, 2]


def slow_greedy(model: Decoder, ids: list[int], count: int) -> list[int]:
    """The whole sequence again for every token."""
    ids = list(ids)
    for _ in range(count):
        logits = model(TokenBatch.from_documents([ids]), LogitsHead(softcap=model.arch.final_softcap))
        ids.append(int(logits[-1].argmax()))
    return ids[len(ids) - count :]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen2"])
def test_greedy_equals_a_full_forward_for_every_token(name: str) -> None:
    model, _ = build(**VARIANTS[name])
    assert list(generate(model, PROMPT, max_tokens=10)) == slow_greedy(model, PROMPT, 10)


def test_stops_before_a_stop_token() -> None:
    model, _ = build()
    whole = list(generate(model, PROMPT, max_tokens=8))
    stop = next(i for i in range(1, 8) if whole[i] not in whole[:i])
    assert list(generate(model, PROMPT, max_tokens=8, stop_ids={whole[stop]})) == whole[:stop]


def test_equal_seeds_equal_texts() -> None:
    model, _ = build()
    options: dict[str, Any] = dict(max_tokens=10, temperature=1.5, top_p=0.95)
    texts = {seed: list(generate(model, PROMPT, seed=seed, **options)) for seed in range(4)}
    torch.manual_seed(123)
    assert all(list(generate(model, PROMPT, seed=seed, **options)) == text for seed, text in texts.items())
    assert len({tuple(text) for text in texts.values()}) > 1


def test_draws_leave_the_global_generator_alone() -> None:
    model, _ = build()
    before = torch.get_rng_state()
    list(generate(model, PROMPT, max_tokens=3, temperature=1.0))
    assert torch.equal(before, torch.get_rng_state())


def test_ids_come_one_by_one_and_a_closed_stream_restores_the_model() -> None:
    model, _ = build()
    model.train()
    stream = generate(model, PROMPT, max_tokens=10)
    first = next(stream)
    assert first == slow_greedy(model, PROMPT, 1)[0]
    stream.close()  # type: ignore[attr-defined]
    assert model.training
    assert all(isinstance(block.runner, PlainRunner) for block in model.blocks)


@given(st.lists(st.floats(-4, 4), min_size=2, max_size=9), st.floats(0.05, 1.0), st.integers(0, 1000))
@settings(max_examples=60)
def test_top_p_draws_from_the_smallest_set_that_reaches_it(scores: list[float], top_p: float, seed: int) -> None:
    logits = torch.tensor(scores, dtype=torch.float64)
    probabilities = logits.softmax(0).tolist()
    order = sorted(range(len(scores)), key=lambda i: (-probabilities[i], i))  # scores may differ where these do not
    allowed, mass = set(), 0.0
    for index in order:
        allowed.add(index)
        mass += probabilities[index]
        if mass >= top_p + 1e-9:
            break
    assert choose_token(logits, 1.0, top_p, torch.Generator().manual_seed(seed)) in allowed


def test_draws_follow_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    draws = torch.Generator().manual_seed(0)
    counts = Counter(choose_token(logits, 2.0, 1.0, draws) for _ in range(4000))
    expected = (logits / 2).softmax(0).tolist()
    assert [counts[i] / 4000 for i in range(3)] == pytest.approx(expected, abs=0.03)
    assert choose_token(logits, 0.0, 1.0, draws) == 2
    assert choose_token(logits, 5.0, 0.3, draws) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_tokens=0), "`--max-tokens` must be at least 1; got 0"),
        (dict(max_tokens=1, temperature=-1.0), "`--temperature` must be 0"),
        (dict(max_tokens=1, temperature=float("nan")), "`--temperature` must be 0"),
        (dict(max_tokens=1, top_p=0.0), r"`--top-p` must lie in \(0, 1\]; got 0.0"),
        (dict(max_tokens=14), "exceed the model's 16 positions; use --max-tokens 13"),
    ],
)
def test_values_out_of_range_are_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    model, _ = build()
    with pytest.raises(ConfigError, match=message):
        generate(model, PROMPT, **options)


@pytest.mark.parametrize(("prompt", "message"), [([], "no tokens"), ([1, 31], "token 31 is outside .* of 31")])
def test_prompts_that_the_model_cannot_read(prompt: list[int], message: str) -> None:
    model, _ = build()
    with pytest.raises(DataError, match=message):
        generate(model, prompt, max_tokens=1)
