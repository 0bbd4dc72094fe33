"""`freight generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from freight.cli.exits import say
from freight.cli.inputs import ModelPath, load_model
from freight.errors import ConfigError, DataError


def generate(
    model: ModelPath,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    chat: Annotated[
        Path | None, typer.Option(help="JSON or JSONL file with `messages`; the model speaks next.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 = always the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens up to this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal texts.")] = 0,
) -> None:
    """Let a model write, token by token. For looking at a model, not for serving: export it for that."""
    if (prompt is None) == (chat is None):
        got = "neither" if prompt is None else "both"
        raise ConfigError(f"exactly one of `--prompt` and `--chat` must be given; got {got}.")
    messages, tools = _conversation(chat) if chat is not None else (None, None)
    decoder, tokenizer, config = load_model(model)
    from freight.data.template import load_chat_template
    from freight.train.generate import generate as continue_ids
    from freight.train.prompt import chat_ids, prompt_ids, stop_ids, stream_text

    data = config.data if config else None
    template = load_chat_template(tokenizer, data.chat_template if data else None, data.template_kwargs if data else {})
    ids = prompt_ids(tokenizer, prompt or "") if messages is None else chat_ids(tokenizer, template, messages, tools)
    new = continue_ids(
        decoder,
        ids,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_ids=stop_ids(tokenizer, None if messages is None else template),
    )
    for piece in stream_text(tokenizer, new):
        sys.stdout.write(piece)
        sys.stdout.flush()
    say()


def _conversation(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools of a file: `{"messages": [...]}`, a bare list, or the first line of a JSONL file.

    Raises:
        DataError: Missing, no JSON, no messages, or tools that are no list.
    """
    import json

    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. Give a JSON file with `messages`.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Give a JSON file with `messages`.") from None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        try:
            record = json.loads(text.strip().split("\n", 1)[0])
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not JSON ({error}). Give a JSON file with `messages`.") from None
    messages = record.get("messages") if isinstance(record, dict) else record
    if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
        raise DataError(f'{path}: no `messages`. Write {{"messages": [{{"role": "user", "content": "Hello"}}]}}.')
    tools = record.get("tools") if isinstance(record, dict) else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{path}: `tools` must be a list of JSON objects. Write it as in training, or leave it out.")
    return messages, tools


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
