"""Configs: a right one as YAML text, and what is done to it, as text, as a tree and on the command line."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import yaml

from freight.config.aliases import ALIASES, LACKING
from freight.config.keys import every_key
from freight.config.schema import Config

RIGHT: dict[str, Any] = {
    "model": {"preset": "debug"},
    "data": {
        "train": "train.jsonl",
        "validation": None,
        "tokenizer": "tokenizer",
        "sequence_length": 64,
        "packing": {"algorithm": "first_fit_shuffle", "pack_size": 128},
    },
    "train": {"steps": 10, "global_batch_size": 4, "optimizer": {"lr": 2e-4}, "schedule": {"name": "cosine"}},
    "log": {"dir": "runs/x", "wandb": None},
}
KEYS = [".".join(map(str, path)) for path in every_key(Config)]
NAMES = [*KEYS, "model", "data", "train", "log", "model.rope", "data.packing", *ALIASES, *LACKING]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 64, 2**63, 10**30, -(10**400), 0.5, 1e308, float("inf"), float("nan"), "", "none",
    "text", "auto", "${train.seed}", "${", "${train}", "${oc.env:HOME}", "${x.y}", "???", "1e6", "a\x00b", "😀", [],
    [1], [[1]], ["a", None], [{"path": "a"}], [{"weight": 1}], {}, {"a": 1}, {"a": {"b": [1, {"c": None}]}}, {"": 1},
    {"path": "x", "fields": {"text": 5}}, "x" * 5000, "a: b", "*", "[", {"${x}": 1}, {"a.b": 1},
]  # fmt: skip


def spoiled_config(rng: Random) -> tuple[list[str], bytes, list[str]]:
    """What was done, the bytes of a config file, and overrides."""
    done: list[str] = []
    tree = yaml.safe_load(yaml.safe_dump(RIGHT))
    for _ in range(rng.randrange(3)):
        name = rng.choice(list(TREES))
        tree = TREES[name](rng, tree)
        done.append(name)
    content = yaml.dump(tree, Dumper=yaml.SafeDumper, default_flow_style=rng.choice([None, False, True])).encode()
    if rng.random() < 0.6:
        name = rng.choice(list(TEXTS))
        content = TEXTS[name](rng, content)
        done.append(name)
    overrides: list[str] = []
    if rng.random() < 0.4:
        overrides = [_override(rng) for _ in range(rng.randint(1, 3))]
        done.append("override")
    return done or ["unchanged"], content, overrides


def _override(rng: Random) -> str:
    value = rng.choice(
        [*map(repr, VALUES[:14]), "", "[", "{a: b", "*x", "&a 1", "!!python/none", "\t", "1e6", "a=b", "'"]
    )
    key = rng.choice(
        [*NAMES, "", ".", "a..b", "train.", ".train", "train.steps.x", "model.rope.scaling.type", "--x", "é"]
    )
    return f"{key}{rng.choice(['=', '=', '=', '', ' = '])}{value}"


def _set(tree: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    branch = tree if isinstance(tree, dict) else {}
    return {**branch, path[0]: _set(branch.get(path[0]), path[1:], value)}


def _nest(rng: Random, tree: Any) -> Any:
    deep: Any = 1
    for _ in range(rng.choice([3, 50, 150])):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return _set(tree, rng.choice(NAMES).split("."), deep)


def _misspelt(rng: Random, tree: Any) -> Any:
    name = rng.choice(NAMES)
    at = rng.randrange(len(name))
    return _set(tree, (name[:at] + rng.choice("_xs") + name[at + 1 :]).split("."), rng.choice(VALUES))


def _both_spellings(rng: Random, tree: Any) -> Any:
    name = rng.choice(KEYS)
    value = rng.choice([1, 2, None, {"a": 1}])
    return {**_set(tree, name.split("."), rng.choice([value, 3])), name: value}


TREES: dict[str, Callable[[Random, Any], Any]] = {
    "wrong value": lambda rng, t: _set(t, rng.choice(NAMES).split("."), rng.choice(VALUES)),
    "unknown key": _misspelt,
    "foreign name": lambda rng, t: _set(t, [rng.choice([*ALIASES, *LACKING])], rng.choice(VALUES)),
    "dotted key": lambda rng, t: {**t, rng.choice(NAMES): rng.choice(VALUES)},
    "both spellings": _both_spellings,
    "key is no text": lambda rng, t: {**t, rng.choice([1, None, True, 1.5]): rng.choice(VALUES)},
    "nested deeply": _nest,
    "missing key": lambda rng, t: {k: v for k, v in t.items() if k != rng.choice(list(t))},
    "section is a value": lambda rng, t: {**t, rng.choice(["model", "data", "train", "log"]): rng.choice(VALUES)},
    "source": lambda rng, t: _set(t, ["data", "train"], [rng.choice(VALUES), {"path": rng.choice(VALUES)}]),
}


def _put(rng: Random, content: bytes, what: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + what + content[at:]


def _line(rng: Random, content: bytes, lines: list[str]) -> bytes:
    rows = content.split(b"\n")
    at = rng.randrange(len(rows) + 1)
    return b"\n".join([*rows[:at], rng.choice(lines).encode(), *rows[at:]])


_LINES = [
    "train: &t {steps: 1}", "x: *t", "<<: {steps: 1}", "<<: *nothing", "<<: 5", "a: &a [*a]", "a: &a {b: *a}",
    "? [a]\n: b", "? {a: b}\n: c", "train.steps: 5", "steps: 0x1F", "steps: 010", "steps: 1_000", "a: 12:30:45",
    "a: 2001-01-01", "a: !!python/object:os.system x", "a: !!binary x", "a: !!set {a}", "a: !!timestamp x",
    "a: !!int x", "a: !!float z", "a: .inf", "a: 9" + "9" * 5000, "a: 1e" + "9" * 400, "---", "...", "%YAML 9.9",
    "- a", "a: |\n  b", "a: 'b", "@x", "a: !!omap [a]", "a: !!map 5", "a: !number x", "!number [1]: x", "a: !!bool x",
    "a: !!null x", "a: !!pairs [1]",
]  # fmt: skip
TEXTS: dict[str, Callable[[Random, bytes], bytes]] = {
    "cut short": lambda rng, c: c[: rng.randrange(len(c))],
    "flipped bit": lambda rng, c: bytes(
        [*c[: (at := rng.randrange(len(c)))], c[at] ^ (1 << rng.randrange(8)), *c[at + 1 :]]
    ),
    "tab": lambda rng, c: _put(rng, c, b"\t"),
    "no utf-8": lambda rng, c: _put(rng, c, rng.choice([b"\xff", b"\xc3(", b"\xed\xa0\x80"])),
    "utf-16": lambda rng, c: c.decode().encode(rng.choice(["utf-16", "utf-16-le", "utf-32"])),
    "control": lambda rng, c: _put(
        rng, c, rng.choice([b"\x00", b"\x07", b"\xc2\x85", b"\xe2\x80\xa8", b"\xef\xbb\xbf"])
    ),
    "odd line": lambda rng, c: _line(rng, c, _LINES),
    "odd character": lambda rng, c: _put(rng, c, rng.choice("{}[]&*!|>'\"%@`,:#-?$").encode()),
    "line twice": lambda rng, c: b"\n".join(sorted(c.split(b"\n") * 2)) if rng.random() < 0.2 else c + c,
    "indented": lambda rng, c: c.replace(b"\n  ", b"\n" + b" " * rng.randint(0, 5), rng.randint(1, 3)),
    "bomb": lambda rng, c: c + _bomb(rng.choice([3, 40]), "[{}]"),
    "merge bomb": lambda rng, c: c + _bomb(rng.choice([3, 40]), "{{<<: [{}]}}"),
    "empty": lambda rng, c: rng.choice([b"", b"\n", b"# x", b"---\n---\n", b"null", b"[]", b"5", b"a"]),
    "brackets": lambda rng, c: b"a: " + b"[" * (d := rng.choice([30, 100, 1500])) + b"]" * d + b"\n" + c,
}


def _bomb(levels: int, shape: str) -> bytes:
    """Aliases of aliases: 9 ** levels values from a few lines."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {shape.format(', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, levels)]
    return "\n".join(lines).encode()
