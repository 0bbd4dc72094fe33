"""The `freight` command: parsing and printing only, one file per command.

Commands import the rooms they need when they run, so that help is there at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from freight import __version__
from freight.cli.bench import bench
from freight.cli.check import check
from freight.cli.demo import demo
from freight.cli.env import env
from freight.cli.evaluate import evaluate
from freight.cli.exits import Commands
from freight.cli.export import export
from freight.cli.generate import generate
from freight.cli.import_model import import_model
from freight.cli.pack import pack
from freight.cli.schema import schema
from freight.cli.show import show
from freight.cli.train import train
from freight.cli.verify import verify

app = typer.Typer(
    name="freight",
    cls=Commands,
    help="Train large language models on long and packed sequences.",
    epilog="Example: freight train run.yaml train.steps=10",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"freight {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


_EXAMPLES = {
    "check": (check, "freight check run.yaml train.micro_batch_tokens=8192"),
    "schema": (schema, "freight schema > freight.schema.json"),
    "pack": (pack, "freight pack run.yaml --pack-sizes 2048,4096 --output packed"),
    "show": (show, "freight show chats.jsonl --tokenizer models/smollm2 --record 3"),
    "train": (train, "freight train run.yaml train.steps=100 --resume auto"),
    "verify": (verify, "freight verify run.yaml --ranks 8"),
    "evaluate": (evaluate, "freight evaluate runs/first --data heldout.jsonl"),
    "generate": (generate, 'freight generate runs/first --prompt "Once upon a time" --max-tokens 50'),
    "import": (import_model, "freight import model.gguf models/smollm2"),
    "export": (export, "freight export runs/first exported --dtype bf16"),
    "bench": (bench, "freight bench attention --json"),
    "env": (env, "freight env"),
    "demo": (demo, "freight demo"),
}
for _name, (_command, _example) in _EXAMPLES.items():
    app.command(_name, epilog=f"Example: {_example}")(_command)


def run() -> None:
    """Run the command line and exit with its code."""
    app()
