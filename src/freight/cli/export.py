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
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights written; bf16, or fp32 for an adapter.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Of an adapter run, the whole model instead.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Write a trained model as a Hugging Face folder: weights, config, tokenizer, chat template.

    Of a run with `adapter`, the folder holds the adapter alone, as peft loads it onto the base.
    """
    from freight.assemble.stored_model import convert_model
    from freight.train.console import Progress

    with Progress() as progress:
        model = convert_model(source, output, dtype=dtype, merge=merge, force=force, progress=progress)
    if model.adapter is not None and not merge:
        say(
            f"{output}: adapter, {dtype or 'fp32'}; load it with "
            f"peft.AutoPeftModelForCausalLM.from_pretrained({str(output)!r})"
        )
    else:
        say(
            f"{output}: {dtype or 'bf16'}; load it with "
            f"transformers.AutoModelForCausalLM.from_pretrained({str(output)!r})"
        )
