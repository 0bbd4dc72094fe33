"""Files for commands: a byte-level tokenizer, chats, texts and a config that trains in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(folder: Path) -> Path:
    """A tokenizer folder: one token per byte, ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    raw = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*special, *alphabet])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=special
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def chats(path: Path, count: int = 12) -> Path:
    """Short conversations of unequal length."""
    records = [
        {"messages": [{"role": "user", "content": f"count to {n}"}, {"role": "assistant", "content": "1 " * (n + 1)}]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def config(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write a config, its data and its tokenizer; sections are merged over the defaults."""
    raw: dict[str, Any] = {
        "model": {"preset": "debug", "num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32},
        "data": {
            "train": str(chats(folder / "train.jsonl")),
            "tokenizer": str(tokenizer(folder)),
            "sequence_length": 128,
            "num_workers": 0,
            "cache_dir": None,
            "packing": {"pack_size": 256},
        },
        "train": {"steps": 3, "global_batch_size": 2, "optimizer": {"lr": 1.0e-3}, "precision": "fp32"},
        "log": {"dir": str(folder / "run"), "tensorboard": False},
    }
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return path
