"""`freight import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from freight.cli.exits import say

Dtype = Literal["bf16", "fp16", "fp32"]


def import_model(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder or .gguf file.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    dtype: Annotated[Dtype, typer.Option(help="Of the weights written.")] = "bf16",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Read a model and write it as a Hugging Face folder that Freight and transformers load."""
    from freight.assemble.stored_model import convert_model
    from freight.checkpoint.hf_import import read_architecture
    from freight.train.console import Progress

    arch = read_architecture(source)
    with Progress() as progress:
        convert_model(source, output, dtype=dtype, force=force, progress=progress)
    say(
        f"{output}: {arch.family or 'llama'}, {arch.num_layers} layers, hidden {arch.hidden_size}, "
        f"{arch.num_attention_heads} heads of {arch.dims_per_head}, {arch.groups} KV heads, vocabulary "
        f"{arch.vocab_size:,}, {arch.max_position_embeddings:,} positions, {dtype}"
    )
