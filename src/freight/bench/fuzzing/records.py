"""Records that are right, records that are spoiled, and their bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

FORMATS = ("messages", "conversations", "prompt_completion", "alpaca", "text")
WORDS = [
    "a",
    "b",
    "bc",
    "hi there",
    "é",
    "日本",
    "😀",
    "\n",
    "  ",
    "x\ty",
    "None",
    "null",
    "{",
    "2+2=4",
    "\u2028",
    "\x85",
]
TRAPS = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<eos>",
    "</think>",
    "[INST]",
    "\ufeff",
    "\x00",
    "{{ bos_token }}",
    "🏳️‍🌈",
]


def make_record(rng: Random, name: str) -> dict[str, Any]:
    """A right record of a format."""
    match name:
        case "messages":
            return _messages(rng)
        case "conversations":
            turns = [{"from": role, "value": said(rng)} for role in _roles(rng, "human", "gpt")]
            return {"conversations": turns, **({"system": said(rng)} if rng.random() < 0.3 else {})}
        case "prompt_completion" if rng.random() < 0.3:
            prompt, completion = {"role": "user", "content": said(rng)}, {"role": "assistant", "content": said(rng)}
            return {"prompt": [prompt], "completion": [completion]}
        case "prompt_completion":
            return {"prompt": said(rng), "completion": said(rng) or "b"}
        case "alpaca":
            extra = {"input": said(rng)} if rng.random() < 0.5 else {}
            history = {"history": [[said(rng), said(rng)]]} if rng.random() < 0.3 else {}
            return {"instruction": said(rng), "output": said(rng), **extra, **history}
        case _:
            return {"text": said(rng) or "b"}


def said(rng: Random) -> str:
    """A short text."""
    return "".join(rng.choices(WORDS, k=rng.randrange(4)))


def _roles(rng: Random, user: str, assistant: str) -> list[str]:
    roles = [user, assistant] * rng.randint(1, 3)
    return roles + [user] if rng.random() < 0.15 else roles


def _messages(rng: Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": said(rng)})
    for role in _roles(rng, "user", "assistant"):
        content: Any = said(rng)
        if rng.random() < 0.15:
            content = [{"type": "text", "text": part} for part in (content, said(rng))]
        messages.append({"role": role, "content": content})
    return {"messages": messages}


def spoil(rng: Random, record: Any) -> tuple[str, Any]:
    """Change one thing in a record; returns what was done and the record, which may be right still."""
    name = rng.choice(list(SPOILERS) if isinstance(record, dict) else ["no record"])
    return name, SPOILERS[name](rng, record)


def _anywhere(rng: Random, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with one random part of it changed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        return {**value, key: _anywhere(rng, value[key], change)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], _anywhere(rng, value[at], change), *value[at + 1 :]]
    return change(value)


def _wrong_value(rng: Random, record: Any) -> Any:
    wrong: list[Any] = [None, 5, -1.5, True, "", [], {}, [[]], {"a": 1}, "text", 10**30, 1e300, ["a", None]]
    return _anywhere(rng, record, lambda _: rng.choice(wrong))


def _without_key(rng: Random, record: Any) -> Any:
    def drop(value: Any) -> Any:
        if isinstance(value, dict) and value:
            key = rng.choice(list(value))
            return {k: v for k, v in value.items() if k != key}
        return value

    return drop(record) if rng.random() < 0.3 else _in_message(rng, record, drop)


def _in_message(rng: Random, record: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """The record with one of its messages changed, where it has any."""
    for key in ("messages", "conversations", "prompt", "completion"):
        turns = record.get(key) if isinstance(record, dict) else None
        if isinstance(turns, list) and turns:
            at = rng.randrange(len(turns))
            if isinstance(turns[at], dict):
                return {**record, key: [*turns[:at], change(turns[at]), *turns[at + 1 :]]}
    return record


def _with(rng: Random, record: Any, extras: list[dict[str, Any]]) -> Any:
    extra = rng.choice(extras)
    return _in_message(rng, record, lambda message: {**message, **extra})


_CALLS: list[Any] = [
    [{"function": {"name": "f", "arguments": '{"a": "\\"x\\""}'}}],
    [{"function": {"name": "f", "arguments": {"a": 1}}, "id": "1", "type": "function"}, {"name": "g"}],
    [{"function": {"name": "f", "arguments": "{"}}],
    [{"function": {"name": 5}}],
    {"function": {}},
    [5],
]
_PARTS: list[Any] = [
    [{"type": "text", "text": "b"}, {"type": "text", "text": ""}],
    [{"type": "image_url", "image_url": "x"}],
    [{"type": "text"}],
    ["b"],
    [],
]
SPOILERS: dict[str, Callable[[Random, Any], Any]] = {
    "wrong value": _wrong_value,
    "missing key": _without_key,
    "unknown role": lambda rng, r: _with(
        rng, r, [{"role": role, "from": role} for role in ("critic", "", None, 5, "USER", "tool", "developer", "bot")]
    ),
    "tool calls": lambda rng, r: _with(
        rng, r, [{"tool_calls": calls, **more} for calls in _CALLS for more in ({}, {"content": None}, {"content": ""})]
    ),
    "tools": lambda rng, r: {**r, "tools": rng.choice([[{"name": "f"}], '[{"name": "f"}]', "[", [5], {}, None, ""])},
    "parts": lambda rng, r: _with(rng, r, [{"content": parts, "value": parts} for parts in _PARTS]),
    "weight": lambda rng, r: _with(rng, r, [{"weight": w} for w in (0, 1, 2, "1", None, True, 0.5, -1, [])]),
    "reasoning": lambda rng, r: _with(rng, r, [{k: v} for k in ("reasoning_content", "name") for v in ("x", 5, None)]),
    "empty turn": lambda rng, r: _with(rng, r, [{"content": "", "value": ""}]),
    "trap in a text": lambda rng, r: _anywhere(rng, r, lambda v: f"{v}{rng.choice(TRAPS)}"),
    "extra key": lambda rng, r: {**r, rng.choice(["id", "source", "metadata"]): rng.choice([1, None, {"a": [1]}])},
    "turns in odd order": lambda rng, r: {k: rng.sample(v, len(v)) if isinstance(v, list) else v for k, v in r.items()},
    "no record": lambda rng, r: rng.choice([None, 5, "text", [r], [], True]),
    "reasoned": lambda rng, r: _with(rng, r, [{"content": "<think>x</think>A", "value": "<think>x</think>A"}]),
}


def to_line(rng: Random, record: Any) -> bytes:
    """A record as one line of JSON, in one of the spellings that mean the same."""
    separators = rng.choice([None, (",", ":")])
    return json.dumps(record, ensure_ascii=rng.random() < 0.5, separators=separators).encode("utf-8", "surrogatepass")


def spoil_bytes(rng: Random, content: bytes) -> tuple[str, bytes]:
    """Change the bytes of a file in one way; returns what was done and the bytes."""
    name = rng.choice(list(BYTES))
    return name, BYTES[name](rng, content)


def _put(rng: Random, content: bytes, what: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + what + content[at:]


def _flip(rng: Random, content: bytes) -> bytes:
    at = rng.randrange(max(1, len(content)))
    return content[:at] + bytes([(content[at : at + 1] or b"a")[0] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


def _cut_out(rng: Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + content[at + rng.randint(1, 20) :]


def _in_value(rng: Random, content: bytes, value: bytes) -> bytes:
    """Put raw JSON in front of some object's keys."""
    places = [i for i, byte in enumerate(content) if byte == ord("{")]
    at = rng.choice(places) + 1 if places else 0
    return content[:at] + value + content[at:]


_RAW = [b'"a": NaN, ', b'"a": -Infinity, ', b'"a": 1e999, ', b'"a": ' + b"9" * 5000 + b", ", b'"a": "\\ud83d", ']
BYTES: dict[str, Callable[[Random, bytes], bytes]] = {
    "flipped bit": _flip,
    "cut short": lambda rng, c: c[: rng.randrange(len(c) + 1)],
    "cut out": _cut_out,
    "nul": lambda rng, c: _put(rng, c, b"\x00"),
    "mark in front": lambda rng, c: rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\xff\xfe\x00\x00"]) + c,
    "mark inside": lambda rng, c: _put(rng, c, b"\xef\xbb\xbf"),
    "line ends": lambda rng, c: c.replace(b"\n", rng.choice([b"\r\n", b"\n\n", b"\r", b"\n \t\r\n", b"\x0c\n"])),
    "raw line end": lambda rng, c: _put(rng, c, rng.choice([b"\n", b"\r", b"\xe2\x80\xa8", b"\x85"])),
    "no utf-8": lambda rng, c: _put(rng, c, rng.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"])),
    "odd value": lambda rng, c: _in_value(rng, c, rng.choice(_RAW)),
    "key twice": lambda rng, c: _in_value(
        rng, c, rng.choice([b'"role": "user", ', b'"content": "", ', b'"text": 1, '])
    ),
    "deep": lambda rng, c: _in_value(rng, c, b'"a": ' + b"[" * (d := rng.choice([10, 900, 9000])) + b"]" * d + b", "),
    "noise line": lambda rng, c: c + b"\n" + rng.randbytes(rng.randrange(12)),
    "comment": lambda rng, c: _put(rng, c, rng.choice([b"// x\n", b",", b"'", b"#"])),
}
