"""`freight demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from freight.cli.exits import say


def demo(
    output: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = Path("runs/demo"),
) -> None:
    """Fine-tune a real 135M model on real packed conversations, here and now, and look at the result."""
    from freight.bench.demo import run_demo

    raise typer.Exit(run_demo(output, say))
