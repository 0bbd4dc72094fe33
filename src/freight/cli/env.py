"""`freight env`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from freight.cli.exits import say


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print versions, devices and threads, for bug reports."""
    import json

    from freight.train.launch import environment

    facts = environment()
    if as_json:
        say(json.dumps(facts, indent=2))
        return
    for name, value in _flat(facts):
        say(f"{name:24} {value}")


def _flat(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += [(f"{name}.{key}", inner) for key, inner in value.items()]
        elif isinstance(value, list):
            rows += [(f"{name}[{index}]", inner) for index, inner in enumerate(value)] or [(name, "none")]
        else:
            rows.append((name, value))
    return [(name, "none" if value is None else value) for name, value in rows]
