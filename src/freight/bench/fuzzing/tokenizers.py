"""Tokenizers made in code, one token per byte, with every unusual setting of special tokens; and template styles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

START, END = "<|im_start|>", "<|im_end|>"
SPECIAL = ["<pad>", "<bos>", "<eos>", START, END, "<|header|>", "<|/header|>", "<|eot|>", "[INST]", "[/INST]"]
MERGES = (("Ċ", "b"), ("Ġ", "b"), (":", "Ġ"), ("Ċ", "Ċ"), ("b", "c"))


@dataclass(frozen=True)
class Style:
    """A way of writing chats.

    Args:
        text: The template.
        answer: What it writes for an assistant's text, the turn's end included.
        rewrites: It changes earlier turns once later ones follow.
    """

    text: str
    answer: Callable[[str], str]
    rewrites: bool = False
    options: dict[str, str] = field(default_factory=dict)


def _ended(content: str) -> str:
    return content + END


_GENERATION_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    + _GENERATION_PROMPT
)
_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + _GENERATION_PROMPT
)
_REWRITING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content.split('</think>')[-1] if loop.index0 < ns.last and m.role == 'assistant' else m.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + _GENERATION_PROMPT
)
STYLES: dict[str, Style] = {
    "chatml": Style(_CHATML, _ended),
    "chatml marked": Style(_MARKED, _ended),
    "llama3": Style(
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|header|>' + m.role + '<|/header|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}",
        lambda content: content.strip() + "<|eot|>",
    ),
    "mistral": Style(
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
        "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}",
        lambda content: " " + content + "<eos>",
    ),
    "rewriting": Style(_REWRITING, _ended, rewrites=True),
    "rewriting delimited": Style(
        _REWRITING, _ended, rewrites=True, options={"assistant_start": "<|im_start|>assistant\n", "assistant_end": END}
    ),
    "tools": Style(
        "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}" + _GENERATION_PROMPT,
        _ended,
    ),
    "shipped chatml": Style("chatml", _ended),
    "shipped plain": Style("plain", lambda content: " " + content + "<eos>"),
}


def plain_tokenizer(
    *, merges: bool = False, bos: bool = True, adds_bos: bool = False, eos: str | None = "<eos>"
) -> PreTrainedTokenizerFast:
    """One token per byte, special tokens above."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(MERGES) if merges else []
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    inner.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single="<bos> $A", special_tokens=[("<bos>", inner.token_to_id("<bos>"))]
        )
    named = {"bos_token": "<bos>" if bos else None, "eos_token": eos, "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, **{name: token for name, token in named.items() if token is not None}
    )


def odd_tokenizer(rng: Random) -> tuple[str, PreTrainedTokenizerFast]:
    """A tokenizer with an unusual setting, and the name of the setting."""
    name = rng.choice(list(ODD))
    return name, ODD[name]()


def _edited(edit: Callable[[Tokenizer], None], **named: str) -> PreTrainedTokenizerFast:
    inner = Tokenizer.from_str(plain_tokenizer().backend_tokenizer.to_str())
    edit(inner)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, **{"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", **named}
    )


def _lower(inner: Tokenizer) -> None:
    inner.normalizer = normalizers.Lowercase()  # pyright: ignore[reportAttributeAccessIssue]


def _strip(inner: Tokenizer) -> None:
    inner.add_special_tokens([AddedToken(END, special=True, normalized=False, lstrip=True, rstrip=True)])


def _unmarked(inner: Tokenizer) -> None:
    inner.add_tokens([AddedToken("<|stop|>", special=False, normalized=False)])


def _surrounds(inner: Tokenizer) -> None:
    inner.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<bos> <pad> $A <eos>",
        special_tokens=[(token, inner.token_to_id(token)) for token in ("<bos>", "<pad>", "<eos>")],
    )


def _truncates(inner: Tokenizer) -> None:
    inner.enable_truncation(4)
    inner.enable_padding(length=16)


def _words() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<unk>", "a", "b", "user", "assistant", *SPECIAL])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    inner.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")


ODD: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "no bos": lambda: plain_tokenizer(bos=False),
    "no eos": lambda: plain_tokenizer(eos=None),
    "neither": lambda: plain_tokenizer(bos=False, eos=None),
    "pad is eos": lambda: _edited(lambda inner: None, pad_token="<eos>"),
    "bos is eos": lambda: _edited(lambda inner: None, bos_token="<eos>"),
    "eos is a word": lambda: _edited(lambda inner: None, eos_token="e"),
    "eos is new": lambda: _edited(lambda inner: None, eos_token="<|new|>"),
    "lower case": lambda: _edited(_lower),
    "stripping end": lambda: _edited(_strip),
    "end not special": lambda: _edited(_unmarked, eos_token="<|stop|>"),
    "surrounded": lambda: _edited(_surrounds),
    "truncates": lambda: _edited(_truncates),
    "words": _words,
    "merges": lambda: plain_tokenizer(merges=True),
    "adds bos": lambda: plain_tokenizer(adds_bos=True),
}
