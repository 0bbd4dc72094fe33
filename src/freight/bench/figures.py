"""Draws the figures of the documentation from the layouts, plans and schedules that the program runs.

Nothing is drawn by hand and nothing is measured: the same version draws the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from freight.bench.context_figures import draw_layouts, draw_ring
from freight.bench.options import chosen_options
from freight.bench.stream_figure import draw_stream
from freight.errors import ConfigError

FIGURES: Mapping[str, Callable[[Path], None]] = {
    "context-layouts": draw_layouts,
    "context-ring": draw_ring,
    "fpdt-stream": draw_stream,
}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """Draw all figures.

    Args:
        options: `output`, a folder, made if it does not exist.

    Returns:
        By figure, the file.

    Raises:
        ConfigError: An option that does not exist, or a folder that cannot be written to.
    """
    chosen = chosen_options(options, {"output": "docs/figures"})
    folder = Path(chosen["output"])
    files = {name: folder / f"{name}.svg" for name in FIGURES}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in files.items():
            FIGURES[name](path)
    except OSError as error:
        raise ConfigError(
            f"option `output`: {folder}: {error.strerror}. Name a folder that can be written to."
        ) from error
    return {"benchmark": "figures", **{name: str(path) for name, path in files.items()}}
