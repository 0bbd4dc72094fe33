"""How a command ends: 0 done, 1 failed, 2 wrong input or config, 130 and 143 interrupted but saved.

A fault of the user's is one line per fault on stderr and never a traceback; a traceback means a bug in Freight.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer._click.core import Context
from typer.core import TyperGroup

from freight.errors import FreightError

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130


class Commands(TyperGroup):
    """The group of all commands; turns errors into lines and codes."""

    def invoke(self, ctx: Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except FreightError as error:
            complain(str(error).split("\n"))
            raise typer.Exit(WRONG_INPUT) from None
        except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
            if error.filename is None:
                raise
            complain([f"{error.filename}: {(error.strerror or 'cannot be used').lower()}. Give another path."])
            raise typer.Exit(WRONG_INPUT) from None
        except BrokenPipeError:
            # The reader (`| head`) has gone. Python would complain once more while it closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(DONE) from None
        except OSError as error:
            complain([f"{error.filename or 'system'}: {(error.strerror or str(error)).lower()}."])
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            complain(["interrupted"])
            raise typer.Exit(INTERRUPTED) from None


def complain(lines: Sequence[str]) -> None:
    """Print faults to stderr, one a line."""
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    sys.stderr.flush()


def say(line: str = "") -> None:
    """Print a line to stdout."""
    print(line, flush=True)


def remark(line: str) -> None:
    """Print a line about the command itself to stderr, so that stdout stays clean for results."""
    print(line, file=sys.stderr, flush=True)
