"""The streaming benchmark: its searches and sums on made-up processes, and one real run of everything, tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freight.bench import streaming
from freight.bench.streaming import Outcome, agree, attempt_in_processes, longest_length, run
from freight.bench.streaming_sides import Chunks, Shape, Try
from freight.errors import ConfigError, DataError

TINY = {
    "ranks": 1,
    "layers": 1,
    "hidden": 16,
    "ffn": 32,
    "heads": 2,
    "groups": 1,
    "vocab": 32,
    "chunk_tokens": 16,
    "ffn_chunk_tokens": 16,
    "loss_chunk_tokens": 8,
    "repeats": 0,
    "real_shape": False,
}
BYTES_PER_TOKEN = {"plain": 1000, "recompute": 100, "streamed": 1}


def made_up(losses: dict[str, float] | None = None, seconds_per_token: float = 0.0) -> Any:
    """Processes that need so many bytes per token, and more seconds the longer the row."""

    def attempt(this: Try, folder: Path, max_seconds: float) -> Outcome:
        peak = 1_000_000 + BYTES_PER_TOKEN[this.side] * this.tokens
        if this.tokens * seconds_per_token > max_seconds:
            return Outcome(False, "time", {})
        if this.cap_bytes and peak > this.cap_bytes:
            return Outcome(False, "memory", {})
        loss = (losses or {}).get(this.side, 3.0)
        seconds = 2.0 if this.side == "recompute" else {"none": 2.5, "context": 1.0}[this.save_attention]
        figures = {"loss": loss, "seconds": [9.0, seconds], "fixed_bytes": 1_000_000, "peak_bytes": peak}
        return Outcome(True, None, figures | {"tier_bytes": 7, "wait_seconds": 0.5, "moved_bytes": 3})

    return attempt


def test_ratios_are_of_the_longest_lengths_and_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "attempt_in_processes", made_up())
    result = run({**TINY, "cap_bytes": 3_000_000, "repeats": 3})
    a, b, c = (result[f"max_tokens_{side}"] for side in "abc")
    assert 2000 * 15 / 16 <= a <= 2000 and 20_000 * 15 / 16 <= b <= 20_000
    assert c == max(100 * a, 16 * b) and result["length_ratio_is_at_least"] is True
    assert result["max_tokens_are_at_least"] == [False, False, True]
    assert result["length_ratio_vs_best"] == round(c / b, 2) and result["length_ratio_vs_plain"] == round(c / a, 2)
    assert result["throughput_ratio_vs_best"] == 0.8 and result["throughput_ratio_default"] == 2.0
    assert result["throughput_tokens"] == int(0.9 * b)
    assert result["bytes_per_token"] == 1.0 and result["tier_bytes"] == 7
    assert result["measured_growth_bytes"] == c and result["predicted_growth_bytes"] > 0


def test_without_a_cap_it_is_a_plain_step_and_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "attempt_in_processes", made_up())
    result = run({**TINY, "margin_bytes": 2_000_000, "real_shape": True})
    assert result["cap"] == 1_000_000 + 256 * 1000 + 2_000_000
    real = result["real_shape"]
    assert (
        real["max_tokens_c"] == 8 * real["max_tokens_b"]
        and real["length_ratio_is_at_least"]
        and "throughput_ratio_vs_best" not in result
    )


def test_what_ends_for_want_of_time_is_a_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "attempt_in_processes", made_up(seconds_per_token=0.001))
    result = run({**TINY, "cap_bytes": 3_000_000, "max_seconds": 15.0})
    assert result["max_tokens_are_at_least"] == [False, True, True]
    assert 15_000 * 15 / 16 <= result["max_tokens_b"] <= 15_000
    assert 15_000 * 15 / 16 <= result["max_tokens_c"] <= 15_000


def test_sides_that_disagree_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "attempt_in_processes", made_up({"streamed": 3.0001}))
    with pytest.raises(DataError, match=r"disagree on the loss of \d+ tokens: .*3\.0001"):
        run({**TINY, "cap_bytes": 3_000_000})
    assert agree({"a": 10.0, "b": 10.00009}) and not agree({"a": 10.0, "b": 10.00011, "c": 10.0})


def test_a_cap_below_everything_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "attempt_in_processes", made_up())
    with pytest.raises(DataError, match=r"not even 256 tokens fit on the side plain below 900000 bytes"):
        run({**TINY, "cap_bytes": 900_000})


@pytest.mark.parametrize("longest", [0, 8, 9, 100, 1000, 4095, 4096, 9999])
@pytest.mark.parametrize("try_limit", [False, True])
def test_search_finds_the_longest_to_a_sixteenth(longest: int, try_limit: bool) -> None:
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= longest

    found = longest_length(fits, 8, 4096, lambda tokens: tokens // 2 * 2, try_limit=try_limit)
    reachable = min(longest, 4096)
    assert found <= reachable and (found >= reachable * 15 / 16 - 2 if longest >= 8 else found == 0)
    assert len(tried) == len(set(tried)) <= 16 and max(tried) <= 4096
    assert all(tokens % 2 == 0 for tokens in tried)
    if try_limit and longest >= 4096:
        assert tried == [4096]


def test_everything_runs_and_agrees() -> None:
    result = run({**TINY, "cap_bytes": 4 << 30, "first_tokens": 64, "max_tokens": 64})
    assert result["max_tokens_a"] == result["max_tokens_b"] == result["max_tokens_c"] == 64
    assert len({round(loss, 4) for loss in result["losses"].values()}) == 1
    assert all(result["max_tokens_are_at_least"]) and result["tier_bytes"] == result["predicted_tier_bytes"]
    assert 0 < result["fixed_bytes"] <= max(result["peaks"]) < 4 << 30
    json.dumps(result)


def test_a_process_above_the_cap_is_ended_and_does_not_fit(tmp_path: Path) -> None:
    shape = Shape(1, 1, 16, 32, 2, 1, 32)
    this = Try("plain", 64, shape, Chunks(16, 16, 8, "device", "disk"), cap_bytes=1 << 20, folder=str(tmp_path))
    assert attempt_in_processes(this, tmp_path, 60.0) == Outcome(False, "memory", {})


def test_a_failed_process_is_heard(tmp_path: Path) -> None:
    shape, chunks = Shape(1, 1, 16, 32, 2, 1, 32), Chunks(16, 16, 8, "device", "disk")
    this = Try("recompute", 64, shape, chunks, folder=str(tmp_path / "missing"))
    with pytest.raises(DataError, match=r"rank 0 of the side recompute failed at 64 tokens: .*`offload.directory`"):
        attempt_in_processes(this, tmp_path, 60.0)


def test_a_process_that_takes_too_long_does_not_fit(tmp_path: Path) -> None:
    shape = Shape(1, 1, 16, 32, 2, 1, 32)
    this = Try("plain", 64, shape, Chunks(16, 16, 8, "device", "disk"), folder=str(tmp_path))
    assert attempt_in_processes(this, tmp_path, 0.05) == Outcome(False, "time", {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk": 3}, r"chunk"),
        ({"chunk_tokens": 2047}, r"`chunk_tokens` must be a multiple of the 2 ranks; got 2047. Use 2048"),
        ({"kv": "host"}, r"`kv` is device or offload; got host"),
        ({"tier": "none"}, r"`tier` is disk or host; got none"),
        ({"layers": 0}, r"`layers` must be at least 1; got 0"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(options)
