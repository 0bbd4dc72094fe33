"""Chat templates that are broken, wrong, endless or hostile; and tokens of a template shuffled at random."""

from __future__ import annotations

import re
from random import Random

from freight.bench.fuzzing.tokenizers import STYLES

_TOKEN = re.compile(r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}", re.DOTALL)
_LOOP = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
BROKEN: dict[str, str] = {
    "syntax": "{% for m in messages %}{{ m.content }",
    "no loop": "{{ messages[0].content }}<|im_end|>",
    "last only": "<|im_start|>{{ messages[-1].content }}<|im_end|>",
    "nothing": "hello<|im_end|>",
    "comment only": "{# nothing #}",
    "raises": "{{ raise_exception('only one user turn') }}",
    "raises later": "{% if messages | length > 2 %}{{ raise_exception('too many\\nturns') }}{% endif %}" + _LOOP,
    "undefined": "{{ nothing.at.all }}" + _LOOP,
    "undefined call": "{{ nothing() }}" + _LOOP,
    "unknown filter": "{{ messages | frobnicate }}",
    "unknown tag": "{% frobnicate %}" + _LOOP,
    "division": "{{ 1 // 0 }}" + _LOOP,
    "huge range": "{% for i in range(10 ** 9) %}x{% endfor %}" + _LOOP,
    "endless": "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}" + _LOOP,
    "silently endless": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}" + _LOOP,
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + _LOOP,
    "doubling macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless recursion": "{% for m in [1, 2, 3] recursive %}{{ loop([1, 2, 3]) }}{% endfor %}",
    "huge text": "{{ 'x' * (10 ** 12) }}" + _LOOP,
    "huge list": "{{ ([0] * 99999999999) | length }}" + _LOOP,
    "huge power": "{{ 9 ** 9 ** 9 }}" + _LOOP,
    "huge power later": "{% set n = messages | length + 9 %}{{ n ** n ** n ** n }}" + _LOOP,
    "huge width": "{{ '%999999999999d' % 1 }}" + _LOOP,
    "huge format": "{{ '{:>99999999999}'.format('x') }}" + _LOOP,
    "huge centre": "{{ 'x' | center(99999999999) }}" + _LOOP,
    "doubling": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}" + _LOOP,
    "doubling joined": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    + _LOOP,
    "doubling block": "{% set n = namespace(s='x') %}"
    "{% for i in range(60) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}" + _LOOP,
    "doubling list": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"
    + _LOOP,
    "replaced": "{% set n = namespace(s='xx') %}"
    "{% for i in range(60) %}{% set n.s = n.s.replace('x', n.s) %}{% endfor %}" + _LOOP,
    "private": "{{ messages.__class__.__mro__ }}" + _LOOP,
    "changes messages": "{% set x = messages.append(1) %}" + _LOOP,
    "includes": "{% include '/etc/passwd' %}",
    "extends": "{% extends 'x' %}",
    "all marked": "{% generation %}" + _LOOP + "{% endgeneration %}",
    "users marked": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'user' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}",
    "nothing marked": "{% generation %}{% endgeneration %}" + _LOOP,
    "marked twice": _LOOP.replace(
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
        "{% generation %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endgeneration %}",
    ),
    "never unmarked": "{% generation %}" + _LOOP,
    "never marked": _LOOP + "{% endgeneration %}",
    "marked in a macro": "{% macro f(m) %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{{ f(m) | trim }}{% endfor %}",
    "role upper": "{% for m in messages %}{{ m.role.upper() + m.content + '<|im_end|>' }}{% endfor %}",
    "numbered": "{{ messages | length }}" + _LOOP,
    "reversed": "{% for m in messages | reverse %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}",
    "nul": "\x00" + _LOOP,
    "surrogate": "{{ '\\ud800' }}" + _LOOP,
}


def broken_template(rng: Random) -> tuple[str, str]:
    """A wrong template, and what is wrong with it."""
    if rng.random() < 0.5:
        name = rng.choice(list(BROKEN))
        return name, BROKEN[name]
    text = rng.choice([style.text for style in STYLES.values() if "{" in style.text])
    for _ in range(rng.randint(1, 3)):
        text = _shuffled(rng, text)
    return "shuffled", text


def _shuffled(rng: Random, text: str) -> str:
    """One token of a template, or one character, removed, doubled or put elsewhere."""
    tokens = list(_TOKEN.finditer(text))
    if tokens and rng.random() < 0.7:
        start, stop = rng.choice(tokens).span()
    else:
        start = rng.randrange(max(1, len(text)))
        stop = start + 1
    piece, rest = text[start:stop], text[:start] + text[stop:]
    at = rng.randrange(len(rest) + 1)
    match rng.randrange(4):
        case 0:
            return rest
        case 1:
            return text[:stop] + piece + text[stop:]
        case 2:
            return rest[:at] + piece + rest[at:]
        case _:
            return text[:at] + rng.choice("{}%#'|.()[]-x\n") + text[at:]
