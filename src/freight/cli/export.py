"""`freight export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from freight.cli.exits import say
from freight.cli.import_model import Dtype


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run folder, checkpoint or model folder.", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    dtype: Annotated[Dtype, typer.Option(help="Of the weights written.")] = "bf16",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Write a trained model as a Hugging Face folder: weights, config, tokenizer, chat template."""
    from freight.assemble.stored_model import convert_model
    from freight.train.console import Progress

    with Progress() as progress:
        convert_model(source, output, dtype=dtype, force=force, progress=progress)
    say(f"{output}: {dtype}; load it with transformers.AutoModelForCausalLM.from_pretrained({str(output)!r})")
