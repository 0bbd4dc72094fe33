"""The two sides of the benchmark of tokenising, each run in a process of its own so that its memory is its own.

The plain side is what a script with `datasets` does: load the JSON, map a function that renders and tokenises a chat
with its tokenizer's `apply_chat_template`, and mask everything before the last answer by the length of the prompt.
"""

# Imports stand where they are used: worker processes import this file too, and must not load what only one side needs.
# ruff: noqa: PLC0415

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

SEQUENCE_LENGTH = 8192
PACK_SIZE = 8192


def freight_side(file: str, tokenizer_path: str, folder: str, *, processes: int, pack: bool) -> dict[str, Any]:
    """Tokenise into a fresh cache, and pack into a file if asked to."""
    from freight.config.schema import DataConfig, PackingConfig
    from freight.data.load.pack_files import pack_to_files
    from freight.data.render.tokenizer import load_tokenizer
    from freight.data.tokens.tokenise import tokenise

    tokenizer = load_tokenizer(tokenizer_path)
    config = DataConfig(
        train=file,
        sequence_length=SEQUENCE_LENGTH,
        truncation="drop",
        cache_dir=str(Path(folder) / "cache"),
        packing=PackingConfig(pack_size=PACK_SIZE),
    )
    began = time.perf_counter()
    documents = tokenise(config.train or (), config, tokenizer, vocab_size=len(tokenizer), processes=processes or None)
    seconds = time.perf_counter() - began
    result = {"seconds": seconds, "documents": len(documents), "tokens": documents.metadata["num_tokens"]}
    if pack:
        began = time.perf_counter()
        (report,) = pack_to_files(config, tokenizer, Path(folder) / "packed")
        result |= {"pack_seconds": time.perf_counter() - began, "rows": report.as_dict()["rows"]}
    return result


def datasets_side(file: str, tokenizer_path: str, folder: str, *, processes: int) -> dict[str, Any]:
    """The same with `datasets.map`; 0 processes = in this one."""
    import datasets

    from freight.data.render.tokenizer import load_tokenizer

    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(tokenizer_path)
    began = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=folder)
    mapped = rows.map(
        apply_template,
        fn_kwargs={"tokenizer": tokenizer},
        remove_columns=rows.column_names,
        num_proc=processes or None,
        new_fingerprint="plain",
    )
    seconds = time.perf_counter() - began
    lengths = datasets.Dataset.select_columns(mapped, ["length"])["length"]
    return {"seconds": seconds, "documents": len(lengths), "tokens": sum(lengths)}


def apply_template(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Ids of a conversation that ends in an answer, and which of them are the answer's."""
    messages = row["messages"]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=False)
    mask = [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    return {"input_ids": ids, "loss_mask": mask, "length": len(ids)}


def main() -> None:
    """Run the side that the first argument names, with the JSON options of the second, and print its result."""
    side = {"freight": freight_side, "datasets": datasets_side}[sys.argv[1]]
    print(json.dumps(side(**json.loads(sys.argv[2]))))  # noqa: T201 - read by the benchmark


if __name__ == "__main__":
    main()
