"""A complete small configuration that tests bend."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml


def example(folder: Path) -> dict[str, Any]:
    """A config whose files exist in `folder`."""
    data, tokenizer = folder / "chats.jsonl", folder / "tokenizer.json"
    data.write_text('{"text": "a"}\n')
    tokenizer.write_text("{}")
    return copy.deepcopy(
        {
            "model": {"preset": "debug"},
            "data": {
                "train": str(data),
                "tokenizer": str(tokenizer),
                "sequence_length": 64,
                "packing": {"pack_size": 128},
            },
            "train": {"steps": 10, "global_batch_size": 4, "optimizer": {"lr": 1.0e-3}},
        }
    )


def put(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Set a dotted key."""
    *parents, last = key.split(".")
    node = raw
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value
    return raw


def write(folder: Path, raw: Any) -> Path:
    """Write a config file."""
    path = folder / "run.yaml"
    path.write_text(raw if isinstance(raw, str) else yaml.safe_dump(raw, sort_keys=False))
    return path
