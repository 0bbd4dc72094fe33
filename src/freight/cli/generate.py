"""`freight generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freight.cli.exits import remark, say
from freight.cli.inputs import ModelPath, load_model
from freight.errors import ConfigError, DataError

if TYPE_CHECKING:
    from freight.data.render.messages import Conversation


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
    conversation = _conversation(chat) if chat is not None else None
    decoder, tokenizer, config = load_model(model)
    from freight.data.render.template import load_chat_template
    from freight.train.generate import generate as continue_ids
    from freight.train.prompt import chat_ids, prompt_ids, stop_ids, stream_text

    data = config.data if config else None
    template = load_chat_template(tokenizer, data.chat_template if data else None, data.template_kwargs if data else {})
    ids = prompt_ids(tokenizer, prompt or "") if conversation is None else chat_ids(tokenizer, template, conversation)
    new = continue_ids(
        decoder,
        ids,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_ids=stop_ids(tokenizer, None if conversation is None else template),
    )
    for piece in stream_text(tokenizer, new):
        sys.stdout.write(piece)
        sys.stdout.flush()
    say()


def _conversation(path: Path) -> Conversation:
    """The chat of a file.

    Raises:
        DataError: Missing, no JSON, or no chat.
    """
    from freight.train.prompt import read_chat

    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. Give a JSON file with `messages`.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Give a JSON file with `messages`.") from None
    unused: list[str] = []
    try:
        conversation = read_chat(text, unused.append)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if unused:
        remark(f"{path}: keys that are not used: {', '.join(dict.fromkeys(unused))}")
    return conversation
