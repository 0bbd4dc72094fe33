"""The longest row that trains under one memory cap: plain, with recompute and offload, and streamed; and their speed.

Three sides on the same ranks, model and cap: plain flash attention with a dense loss; the best that is usual, which is
full recompute with its inputs on a tier, a loss in chunks and exchanged heads; and blocks streamed chunk by chunk. The
cap is resident memory of one process. A length fits if a fresh process gets through forward, backward and an optimizer
step below it. Lengths double and are then bisected to a sixteenth; the streamed side is first tried at the length that
is asked of it (`goal_plain` and `goal_best` times the others'), and if that fits nothing longer is tried.

Speed is tokens per second at 0.9 of the second side's longest length, in turns, medians, first steps left out. All
sides must agree on the loss.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from freight import __version__
from freight.bench.options import chosen_options
from freight.bench.rank_processes import module_command, run_ranks
from freight.bench.streaming_sides import OVER_CAP, Chunks, Shape, Side, Try
from freight.errors import ConfigError, DataError
from freight.memory.stores import Tier
from freight.planner.stream_memory import StreamShape, device_bytes, tier_bytes

OPTIONS: dict[str, Any] = {
    "ranks": 2,
    "layers": 2,
    "hidden": 256,
    "ffn": 768,
    "heads": 8,
    "groups": 2,
    "vocab": 32_768,
    "chunk_tokens": 2048,
    "ffn_chunk_tokens": 1024,
    "loss_chunk_tokens": 256,
    "kv": "device",
    "tier": "disk",
    "directory": None,
    "cap_bytes": None,
    "margin_bytes": 128 << 20,
    "first_tokens": 256,
    "max_tokens": 1 << 22,
    "max_seconds": 3600.0,
    "goal_plain": 100,
    "goal_best": 16,
    "repeats": 5,
    "real_shape": True,
    "real_goal": 8,
    "real_seconds": 3600.0,
}
SHARE_OF_LONGEST = 0.9
CAP_TOKENS = 256
SPEED_STEPS = 3  # the first is left out
LOSS_TOLERANCE = 1e-5  # relative, in float32
# A large model on few tokens: what a layer of Llama-8B needs, with a vocabulary that does not matter beside it.
REAL_SHAPE = {"layers": 1, "hidden": 4096, "ffn": 14_336, "heads": 32, "groups": 8, "vocab": 1024}
# Its keys and values are 8 KiB a token of one rank, too many for the device.
REAL_WAY = {
    "chunk_tokens": 1024,
    "ffn_chunk_tokens": 1024,
    "loss_chunk_tokens": 256,
    "kv": "offload",
    "first_tokens": 2048,  # weights are so large beside them that shorter rows cost nothing
    "repeats": 1,
    "cap_bytes": None,
}
SIDES = "freight.bench.streaming_sides"
# glibc keeps freed memory by rules that depend on what was freed before; fixed thresholds give it back at once.
VARIABLES = {"MALLOC_MMAP_THRESHOLD_": 131_072, "MALLOC_TRIM_THRESHOLD_": 131_072, "OMP_NUM_THREADS": 1}


@dataclass(frozen=True)
class Outcome:
    """What became of a try.

    Args:
        fits: Whether all ranks got through it below the cap.
        reason: Why not: `memory` or `time`.
        figures: Of the rank with the highest peak, as `streaming_sides.attempt` gives them; its `seconds` are those of
            the slowest rank.
    """

    fits: bool
    reason: str | None
    figures: dict[str, Any]


@dataclass(frozen=True)
class Longest:
    """The result of a search.

    Args:
        tokens: Longest that fits.
        limited: Whether something other than memory ended the search, so that longer ones may fit too.
        outcome: Of that length.
    """

    tokens: int
    limited: bool
    outcome: Outcome


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Search, and measure speed.

    Args:
        options: Of the model `layers`, `hidden`, `ffn`, `heads`, `groups`, `vocab`; `ranks`, of one thread each;
            `chunk_tokens`, `ffn_chunk_tokens`, `loss_chunk_tokens` over all ranks; `kv` (`device`, `offload`), `tier`
            (`disk`, `host`) and its `directory`; `cap_bytes` (null = peak of a plain step on 256 tokens, and
            `margin_bytes` more); `first_tokens`, `max_tokens`, `max_seconds` of a try; `goal_plain`, `goal_best`;
            `repeats` of the speed (0 = none); `real_shape` (whether to measure a layer of Llama-8B too), its
            `real_goal` (times the others' longest) and `real_seconds` of a try.

    Returns:
        `length_ratio_vs_best`, `length_ratio_vs_plain` (each "at least" where `..._is_at_least` is true),
        `throughput_ratio_vs_best` (attention repeated on both sides), `throughput_ratio_default` (as shipped),
        `bytes_per_token` ((peak - resident after a first pass over a few tokens) / tokens of the longest
            streamed row),
        `prediction_error` (of what the formula says beyond that), the numbers behind them, and `real_shape`.

    Raises:
        ConfigError: An option that does not exist or cannot be.
        DataError: A process failed, or the sides disagree on the loss.
    """
    chosen = chosen_options(options, OPTIONS)
    _check(chosen)
    began = time.monotonic()
    with _folder(chosen["directory"]) as folder:
        result = Bench(chosen, folder).measure(speed=chosen["repeats"] > 0)
        real = None
        if chosen["real_shape"]:
            goal = {"goal_plain": chosen["real_goal"], "goal_best": chosen["real_goal"]}
            changes = {**REAL_SHAPE, **REAL_WAY, **goal, "max_seconds": chosen["real_seconds"]}
            real = Bench({**chosen, **changes}, folder).measure(speed=chosen["repeats"] > 0)
    return {
        "benchmark": "streaming",
        **chosen,
        **result,
        "real_shape": real,
        "measured_as": "resident memory of the larger rank",
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "freight": __version__,
        "total_seconds": round(time.monotonic() - began),
    }


def _check(chosen: Mapping[str, Any]) -> None:
    counts = ("ranks", "layers", "hidden", "ffn", "heads", "groups", "vocab", "loss_chunk_tokens", "first_tokens")
    for name in (*counts, "chunk_tokens", "ffn_chunk_tokens", "max_tokens"):
        if chosen[name] < 1:
            raise ConfigError(f"option `{name}` must be at least 1; got {chosen[name]}.")
    for name in ("chunk_tokens", "ffn_chunk_tokens", "first_tokens"):
        if chosen[name] % chosen["ranks"]:
            raise ConfigError(
                f"option `{name}` must be a multiple of the {chosen['ranks']} ranks; got {chosen[name]}. "
                f"Use {-(-chosen[name] // chosen['ranks']) * chosen['ranks']}."
            )
    if chosen["kv"] not in ("device", "offload"):
        raise ConfigError(f"option `kv` is device or offload; got {chosen['kv']}.")
    if chosen["tier"] not in get_args(Tier) or chosen["tier"] == "none":
        raise ConfigError(f"option `tier` is disk or host; got {chosen['tier']}.")


@contextmanager
def _folder(directory: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="freight-streaming-", dir=directory) as folder:
        yield Path(folder)


class Bench:
    """One model under one cap.

    Args:
        chosen: Options.
        folder: For files of the tier, and for ranks to meet in.
    """

    def __init__(self, chosen: Mapping[str, Any], folder: Path) -> None:
        self._chosen, self._folder = chosen, folder
        names = ("ranks", "layers", "hidden", "ffn", "heads", "groups", "vocab")
        self.shape = Shape(**{name: chosen[name] for name in names})
        self._tries = 0
        self._outcomes: dict[tuple[Side, int], Outcome] = {}
        self.cap = 0

    def measure(self, *, speed: bool) -> dict[str, Any]:
        """Everything but versions."""
        chosen = self._chosen
        self.cap = chosen["cap_bytes"] or 0
        if not self.cap:
            self.cap = self._attempt("plain", CAP_TOKENS).figures["peak_bytes"] + chosen["margin_bytes"]
        _say(f"cap {self.cap / 2**20:.0f} MiB")
        plain = self._longest("plain")
        best = self._longest("recompute")
        goal = self._unit(max(chosen["goal_plain"] * plain.tokens, chosen["goal_best"] * best.tokens))
        streamed = self._longest("streamed", goal=goal)
        losses = self._losses(plain)
        result = self._lengths(plain, best, streamed) | {"losses": losses}
        return result | (self._speed(best.tokens) if speed else {})

    def _lengths(self, plain: Longest, best: Longest, streamed: Longest) -> dict[str, Any]:
        figures = streamed.outcome.figures
        grown = figures["peak_bytes"] - figures["fixed_bytes"]
        shape = self._stream_shape(streamed.tokens)
        predicted = device_bytes(shape)
        return {
            "length_ratio_vs_best": round(streamed.tokens / best.tokens, 2),
            "length_ratio_vs_plain": round(streamed.tokens / plain.tokens, 2),
            "length_ratio_is_at_least": streamed.limited,
            "bytes_per_token": round(grown / streamed.tokens, 1),
            "prediction_error": round(abs(predicted - grown) / grown, 4),
            "predicted_growth_bytes": predicted,
            "measured_growth_bytes": grown,
            "max_tokens_a": plain.tokens,
            "max_tokens_b": best.tokens,
            "max_tokens_c": streamed.tokens,
            "max_tokens_are_at_least": [each.limited for each in (plain, best, streamed)],
            "ratio_c_a": round(streamed.tokens / plain.tokens, 2),
            "ratio_c_b": round(streamed.tokens / best.tokens, 2),
            "cap": self.cap,
            "peaks": [each.outcome.figures["peak_bytes"] for each in (plain, best, streamed)],
            "fixed_bytes": figures["fixed_bytes"],
            "tier_bytes": figures["tier_bytes"],
            "predicted_tier_bytes": tier_bytes(shape),
            "wait_seconds": round(figures["wait_seconds"], 3),
            "seconds_at_longest": [round(each.outcome.figures["seconds"][0], 2) for each in (plain, best, streamed)],
        }

    def _losses(self, plain: Longest) -> dict[str, float]:
        """Of all sides at the longest length of the plain one.

        Raises:
            DataError: They disagree.
        """
        losses = {"plain": plain.outcome.figures["loss"]}
        for side in ("recompute", "streamed"):
            known = self._outcomes.get((side, plain.tokens))
            outcome = known if known is not None and known.fits else self._attempt(side, plain.tokens)
            losses[side] = outcome.figures["loss"]
        if not agree(losses):
            raise DataError(f"the sides disagree on the loss of {plain.tokens} tokens: {losses}.")
        return losses

    def _speed(self, longest: int) -> dict[str, Any]:
        """Tokens per second, in turns."""
        tokens = self._unit(int(SHARE_OF_LONGEST * longest))
        sides: dict[str, Callable[[], Outcome]] = {
            "best": lambda: self._attempt("recompute", tokens, steps=SPEED_STEPS),
            "equal_recompute": lambda: self._attempt("streamed", tokens, steps=SPEED_STEPS, save_attention="none"),
            "default": lambda: self._attempt("streamed", tokens, steps=SPEED_STEPS),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(self._chosen["repeats"]):
            for name, attempt in sides.items():
                seconds[name] += attempt().figures["seconds"][1:]
        rates = {name: tokens / statistics.median(of_side) for name, of_side in seconds.items()}
        return {
            "throughput_ratio_vs_best": round(rates["equal_recompute"] / rates["best"], 4),
            "throughput_ratio_default": round(rates["default"] / rates["best"], 4),
            "throughput_equal_recompute": round(rates["equal_recompute"] / rates["best"], 4),
            "throughput_default": round(rates["default"] / rates["best"], 4),
            "throughput_tokens": tokens,
            "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        }

    def _longest(self, side: Side, goal: int | None = None) -> Longest:
        """The longest row that fits on a side; nothing above `goal`, which is tried first."""
        limit = min(goal or self._chosen["max_tokens"], self._chosen["max_tokens"])

        def fits(tokens: int) -> bool:
            self._outcomes[side, tokens] = self._attempt(side, tokens, cap_bytes=self.cap)
            return self._outcomes[side, tokens].fits

        tokens = longest_length(
            fits, self._chosen["first_tokens"], self._unit(limit), self._unit, try_limit=goal is not None
        )
        if not tokens:
            raise DataError(
                f"not even {self._chosen['first_tokens']} tokens fit on the side {side} below {self.cap} bytes. "
                "Raise `cap_bytes` or `margin_bytes`."
            )
        timed_out = any(outcome.reason == "time" for (of, _), outcome in self._outcomes.items() if of == side)
        return Longest(tokens, timed_out or tokens == self._unit(limit), self._outcomes[side, tokens])

    def _unit(self, tokens: int) -> int:
        """Tokens that all ranks hold alike."""
        return tokens // self.shape.ranks * self.shape.ranks

    def _chunks(self, tokens: int) -> Chunks:
        """As chosen; a row shorter than four chunks is streamed in smaller ones."""
        chosen = self._chosen
        quarter = -(-tokens // 4 // self.shape.ranks) * self.shape.ranks
        chunk = max(min(chosen["chunk_tokens"], quarter), self.shape.ranks)
        ffn = min(chosen["ffn_chunk_tokens"], chunk)
        return Chunks(chunk, ffn, chosen["loss_chunk_tokens"], chosen["kv"], chosen["tier"])

    def _stream_shape(self, tokens: int) -> StreamShape:
        shape, chunks = self.shape, self._chunks(tokens)
        return StreamShape(
            tokens=tokens,
            ranks=shape.ranks,
            chunk_tokens=chunks.chunk,
            ffn_chunk_tokens=chunks.ffn,
            loss_chunk_tokens=chunks.loss,
            layers=shape.layers,
            hidden=shape.hidden,
            ffn=shape.ffn,
            heads=shape.heads,
            groups=shape.groups,
            head_dim=shape.hidden // shape.heads,
            vocab=shape.vocab,
            element_bytes=4,
            kv=chunks.kv,
        )

    def _attempt(self, side: Side, tokens: int, **changes: Any) -> Outcome:
        """Run one length in fresh processes."""
        self._tries += 1
        own = self._folder / f"{side}-{self._tries}-{self.shape.hidden}"
        own.mkdir()
        limit = float(self._chosen["max_seconds"])
        this = Try(side, tokens, self.shape, self._chunks(tokens), folder=str(own), timeout_seconds=limit, **changes)
        began = time.monotonic()
        outcome = attempt_in_processes(this, own, limit * this.steps)
        seconds = time.monotonic() - began
        peak = f"{outcome.figures['peak_bytes'] / 2**20:.0f} MiB" if outcome.fits else outcome.reason
        _say(f"{side} {tokens} tokens: {'fits' if outcome.fits else 'does not fit'}, {peak}, {seconds:.1f} s")
        if not outcome.fits and not this.cap_bytes:
            allowed = limit * this.steps
            raise DataError(
                f"the side {side} did not get through {tokens} tokens in {allowed:g} s. Raise the option `max_seconds`."
            )
        return outcome


def attempt_in_processes(this: Try, folder: Path, max_seconds: float) -> Outcome:
    """One fresh process per rank; all end when one does.

    Args:
        this: What they do.
        folder: Empty.
        max_seconds: Until all must have ended.

    Raises:
        DataError: One failed, in its own words.
    """
    task = json.dumps(asdict(this))
    commands = [
        module_command(SIDES, str(rank), str(folder / "meeting"), task, variables=VARIABLES)
        for rank in range(this.shape.ranks)
    ]
    ended = run_ranks(commands, folder, max_seconds)
    if ended.timed_out:
        return Outcome(False, "time", {})
    if OVER_CAP in ended.codes:
        return Outcome(False, "memory", {})
    if ended.failed is not None:
        words = ended.said(ended.failed)
        raise DataError(f"rank {ended.failed} of the side {this.side} failed at {this.tokens} tokens: {words}")
    ranks = [json.loads(ended.printed(rank)) for rank in range(this.shape.ranks)]
    largest = max(ranks, key=lambda figures: figures["peak_bytes"])
    seconds = [max(of_ranks) for of_ranks in zip(*(figures["seconds"] for figures in ranks), strict=True)]
    return Outcome(True, None, {**largest, "seconds": seconds})


def longest_length(
    fits: Callable[[int], bool], first: int, limit: int, unit: Callable[[int], int], *, try_limit: bool = False
) -> int:
    """The longest length that fits, to a sixteenth: doubling from `first`, then bisecting.

    Args:
        fits: Whether one does; whatever is shorter than one that fits does too.
        first: Tried first.
        limit: Nothing longer is tried.
        unit: Rounds a length down to one that may be tried.
        try_limit: Begin with `limit`: where it is expected to fit, that saves all other tries.

    Returns:
        0 if not even `first` fits.
    """
    if try_limit and fits(limit):
        return limit
    low, high = 0, min(first, limit)
    while fits(high):
        low = high
        if low == limit:
            return low
        high = min(2 * low, limit)
        if try_limit and high == limit:
            break
    while low and high - low > low / 16 and low < unit((low + high) // 2) < high:
        middle = unit((low + high) // 2)
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def agree(losses: Mapping[str, float]) -> bool:
    """Whether all sides have the same loss, to float32's rounding."""
    return max(losses.values()) - min(losses.values()) <= LOSS_TOLERANCE * max(losses.values())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - progress of a run that takes long
