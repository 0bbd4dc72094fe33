"""`freight train`."""

from __future__ import annotations

from typing import Annotated

import typer

from freight.cli.check import PrintConfig, show_config
from freight.cli.exits import FAILED, complain
from freight.cli.inputs import ConfigPath, Overrides, read_config


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(help="auto (the newest good checkpoint, if any) or a checkpoint folder.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that the folder holds.")] = False,
    print_config: PrintConfig = False,
) -> None:
    """Train as a config says. Exit codes: 0 done, 1 failed, 2 wrong input, 130 and 143 interrupted but saved.

    MFU = model FLOPs / (seconds x peak). Model FLOPs = 6 N per token (N: parameters without the embedding lookup, head
    included) plus attention pairs, counted causal and per document. The peak is the device's table value, or on CPU the
    GEMM rate measured at the start.
    """
    loaded = read_config(config, overrides)
    if print_config:
        show_config(loaded)
        return
    from freight.train.console import TrainingDisplay
    from freight.train.loop import RunFailed
    from freight.train.loop import train as run

    with TrainingDisplay() as display:
        try:
            result = run(
                loaded,
                name=config.stem,
                resume=resume,
                overwrite=overwrite,
                report_line=display.say,
                show_step=display.step,
                progress=display.progress,
            )
        except RunFailed as error:
            complain([str(error)])
            raise typer.Exit(FAILED) from None
    raise typer.Exit(result.exit_code)
