"""`freight train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freight.cli.check import PrintConfig, show_config
from freight.cli.exits import FAILED, WRONG_INPUT, complain
from freight.cli.inputs import ConfigPath, Overrides, read_config
from freight.errors import ConfigError, FreightError

if TYPE_CHECKING:
    from freight.config.schema import Config


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(help="auto (the newest good checkpoint, if any) or a checkpoint folder.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine; on several machines use torchrun.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that the folder holds.")] = False,
    print_config: PrintConfig = False,
) -> None:
    """Train as a config says. Exit codes: 0 done, 1 failed, 2 wrong input, 130 and 143 interrupted but saved.

    MFU = model FLOPs / (seconds x peak). Model FLOPs = 6 N per token (N: parameters without the embedding lookup, head
    included) plus attention pairs, counted causal and per document. The peak is the device's table value, or on CPU the
    GEMM rate measured at the start.
    """
    from freight.train.launch import this_world

    world = this_world()
    try:
        loaded = read_config(config, overrides, world_size=ranks or world.size, quiet=not world.first)
    except FreightError:
        _leave_quietly_unless(first=world.first)
        raise
    if print_config:
        show_config(loaded)
        return
    if ranks is not None and ranks > 1:
        raise typer.Exit(_start_ranks(ranks, loaded, config, overrides, resume, overwrite))
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
            if world.first:
                complain([str(error)])
            raise typer.Exit(FAILED) from None
        except FreightError:
            _leave_quietly_unless(first=world.first)
            raise
    raise typer.Exit(result.exit_code)


def _leave_quietly_unless(*, first: bool) -> None:
    """Of several ranks that found the same fault, the first one tells it."""
    if not first:
        raise typer.Exit(WRONG_INPUT) from None


def _start_ranks(
    ranks: int, config: Config, path: Path, overrides: list[str] | None, resume: str | None, overwrite: bool
) -> int:
    """Start the ranks of a config that can run on so many; the exit code.

    Raises:
        ConfigError: It cannot.
    """
    from freight.planner.execution import world_faults
    from freight.train.local_ranks import run_local_ranks

    if faults := list(world_faults(config, ranks)):
        raise ConfigError(*faults)
    arguments = ["train", str(path), *(overrides or ())]
    arguments += [] if resume is None else ["--resume", resume]
    arguments += ["--overwrite"] if overwrite else []
    code, message = run_local_ranks(ranks, arguments)
    if message is not None:
        complain([message])
    return code
