"""Random bad input, thousands of cases a minute: no traceback, no record lost in silence, no hang.

Each case spoils records, a chat template, a tokenizer's settings or a config, and runs the code that a user's command
would run. Only a `FreightError` may come of it. Where documents come of it, the books must add up (every line is used
or in the rejects file) and the supervised text must be exactly the assistant's texts and turn ends, by a second reader
that shares no code with the first. A case is a pure function of seed and number: `freight bench fuzz seed=0 case=17`
shows one again, with its traceback if it has one.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from transformers import PreTrainedTokenizerBase

from freight.bench.fuzzing.configs import spoiled_config
from freight.bench.fuzzing.judge import lost_lines, numbered_lines, used_lines, wrong_target
from freight.bench.fuzzing.records import FORMATS, make_record, spoil, spoil_bytes, to_line
from freight.bench.fuzzing.templates import broken_template
from freight.bench.fuzzing.tokenizers import STYLES, Style, odd_tokenizer, plain_tokenizer
from freight.bench.options import chosen_options
from freight.config.load import load_config
from freight.config.schema import DataConfig
from freight.data.render.tokenizer import Encoder
from freight.data.tokens.tokenise import tokenise
from freight.errors import ConfigError, FreightError

OPTIONS: dict[str, Any] = {"cases": 10_000, "seed": 0, "case": None, "kind": None}
CASE_SECONDS = 20
SHOWN_FINDINGS = 20
# Tokenizers that change text, or name another end than the templates' own: the answers must be there, no more is asked.
INEXACT = ("merges", "words", "stripping end", "end not special", "lower case", "eos is a word", "eos is new")


class CaseTimeout(BaseException):
    """A case took too long."""


class Finding(Exception):
    """A case that must not be: what is wrong, in words."""


class Tally:
    """What the cases did and what came of them."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.findings: dict[str, list[dict[str, Any]]] = {"tracebacks": [], "silent_losses": [], "hangs": []}

    def note(self, kind: str, done: list[str], outcome: str) -> None:
        """Count a case."""
        self.done.update(f"{kind}: {name}" for name in done)
        self.outcomes[f"{kind} {outcome}"] += 1


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Run the cases.

    Args:
        options: `cases` (default 10,000), `seed` (0), `case` to run a single one, and `kind` (a key of `KINDS`) to pass
            over the cases of other kinds.

    Returns:
        `cases`, `tracebacks`, `silent_losses`, `hangs` (the last three must be 0), how many of each kind were accepted
        and refused, what was done to them and why records were rejected, and the findings with their case numbers.

    Raises:
        ConfigError: An option that does not exist, or a value it cannot have.
    """
    chosen = chosen_options(options, OPTIONS)
    seed, single, kind = chosen["seed"], chosen["case"], chosen["kind"]
    if single is not None and not isinstance(single, int):
        raise ConfigError(f"option `case` must be the number of a case; got {single!r}. Write for example case=17.")
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"option `kind` must be one of {', '.join(KINDS)}; got {kind!r}.")
    numbers = range(chosen["cases"]) if single is None else range(single, single + 1)
    kinds = list(KINDS) if kind is None else [kind]
    tally = Tally()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="freight-fuzz-") as folder:
        for number in numbers:
            _run_case(seed, number, Path(folder), tally, kinds)
    seconds = time.perf_counter() - start
    counts = {name: len(found) for name, found in tally.findings.items()}
    return {
        "cases": len(numbers),
        **counts,
        "seconds": seconds,
        "cases_per_minute": 60 * len(numbers) / seconds,
        **{outcome.replace(" ", "_"): count for outcome, count in sorted(tally.outcomes.items())},
        "done": dict(tally.done.most_common()),
        "reject_reasons": dict(tally.reasons.most_common()),
        "findings": {name: found[:SHOWN_FINDINGS] for name, found in tally.findings.items()},
    }


def _run_case(seed: int, number: int, folder: Path, tally: Tally, kinds: list[str]) -> None:
    rng = Random(f"{seed}:{number}")
    kind = rng.choices(list(KINDS), SHARES)[0]
    if kind not in kinds:
        return
    done: list[str] = []
    outcome, problem, what = "refused", None, ""
    try:
        with _limited(CASE_SECONDS):
            KINDS[kind](rng, folder, done, tally)
        outcome = "accepted"
    except FreightError:
        pass
    except Finding as finding:
        problem, what = "silent_losses", str(finding)
    except CaseTimeout:
        problem, what = "hangs", traceback.format_exc(limit=-4)
    except Exception:  # whatever it is, it is a finding
        problem, what = "tracebacks", traceback.format_exc(limit=-4)
    tally.note(kind, done, problem or outcome)
    if problem is not None:
        found = {"seed": seed, "case": number, "kind": kind, "done": done, "what": what}
        tally.findings[problem].append(found)
        sys.stderr.write(f"{problem}: {json.dumps(found)}\n")


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `CaseTimeout` in the block after some time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise CaseTimeout

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@cache
def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    return plain_tokenizer(adds_bos=name == "adds bos", bos=name != "no bos", merges=name == "merges")


def _spoil_records(rng: Random, folder: Path, done: list[str], tally: Tally) -> None:
    """Right records spoiled, under a right template."""
    style_name = rng.choice(list(STYLES))
    name = rng.choice(FORMATS)
    records: list[Any] = [make_record(rng, name) for _ in range(rng.randint(1, 5))]
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(records))
        what, records[at] = spoil(rng, records[at])
        done.append(what)
    content = b"\n".join(to_line(rng, record) for record in records)
    for _ in range(rng.choice([0, 0, 1, 2])):
        what, content = spoil_bytes(rng, content)
        done.append(what)
    options: dict[str, Any] = {"format": rng.choice([name, name, "auto"])}
    if rng.random() < 0.1:
        options["train_on"] = rng.choice(["last_assistant", "all"])
    tokenizer = _tokenizer(rng.choice(["", "adds bos", "no bos"]))
    _tokenise(rng, folder, content, STYLES[style_name], tokenizer, tally, name, options)


def _spoil_template(rng: Random, folder: Path, done: list[str], tally: Tally) -> None:
    """Right records under a spoiled template."""
    what, text = broken_template(rng)
    done.append(what)
    name = rng.choice(["messages", "conversations"])
    content = b"\n".join(to_line(rng, make_record(rng, name)) for _ in range(rng.randint(1, 3)))
    _tokenise(rng, folder, content, None, _tokenizer(""), tally, name, {"chat_template": text})


def _odd_tokenizer(rng: Random, folder: Path, done: list[str], tally: Tally) -> None:
    """Right records with an unusual tokenizer."""
    what, tokenizer = odd_tokenizer(rng)
    done.append(what)
    style = STYLES[rng.choice(list(STYLES))]
    name = rng.choice(FORMATS)
    content = b"\n".join(to_line(rng, make_record(rng, name)) for _ in range(rng.randint(1, 3)))
    options = {key: rng.choice(["auto", "always", "never"]) for key in ("bos", "eos")}
    exact = None if what in INEXACT else style
    _tokenise(
        rng, folder, content, exact, tokenizer, tally, name, {"chat_template": style.text, **style.options, **options}
    )


def _tokenise(
    rng: Random,
    folder: Path,
    content: bytes,
    style: Style | None,
    tokenizer: PreTrainedTokenizerBase,
    tally: Tally,
    name: str,
    options: dict[str, Any],
) -> None:
    path, rejects = folder / "data.jsonl", folder / "rejects-data.jsonl"
    path.write_bytes(content)
    rejects.unlink(missing_ok=True)
    chosen = {
        "sequence_length": rng.choice([24, 4096, 4096, 4096]),
        "truncation": "drop",
        "on_bad_record": rng.choice(["skip", "skip", "skip", "error"]),
        "cache_dir": None,
        **({"chat_template": style.text, **style.options} if style else {}),
        **options,
    }
    if chosen["on_bad_record"] == "skip":
        chosen["max_skipped_fraction"] = 1.0
    config = DataConfig(train=str(path), **chosen)
    documents = tokenise(str(path), config, tokenizer, vocab_size=1 << 20, output_dir=folder)
    tally.reasons.update(documents.metadata["skipped"])
    lines = numbered_lines(content)
    lost = lost_lines(documents, lines, rejects)
    if lost:
        raise Finding(lost)
    if chosen.get("train_on", "assistant") != "assistant":
        return
    encoder = Encoder(tokenizer)
    for line in dict.fromkeys(used_lines(documents)):
        record = json.loads(lines[line])
        found = documents.metadata["format"]
        wrong = wrong_target(documents, line, record, found, style, encoder)
        if wrong:
            raise Finding(f"line {line} ({found}) {lines[line]!r}: {wrong}; options {chosen}")


def _spoil_config(rng: Random, folder: Path, done: list[str], tally: Tally) -> None:
    """A spoiled config, with overrides."""
    what, content, overrides = spoiled_config(rng)
    done += what
    path = folder / "config.yaml"
    path.write_bytes(content)
    load_config(path, overrides, check_files=rng.random() < 0.2)


KINDS: dict[str, Callable[[Random, Path, list[str], Tally], None]] = {
    "records": _spoil_records,
    "template": _spoil_template,
    "tokenizer": _odd_tokenizer,
    "config": _spoil_config,
}
SHARES = [5, 2, 1, 2]
