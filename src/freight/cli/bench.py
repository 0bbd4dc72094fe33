"""`freight bench`: the measurements behind every claim."""

from __future__ import annotations

import ast
import json
from importlib import import_module
from importlib.resources import files
from pkgutil import iter_modules
from typing import Annotated, Any

import typer

from freight.cli.exits import say
from freight.errors import ConfigError


def bench(
    name: Annotated[str | None, typer.Argument(help="Which one; none lists them.", show_default=False)] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options of the benchmark.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Also print one line of JSON, the last line.")] = False,
) -> None:
    """Measure something on this machine: both sides in one run, alternating, medians."""
    names = benchmarks()
    if name is None:
        for each in names:
            say(f"{each:12} {_first_line(each)}")
        return
    if name not in names:
        from freight.config.messages import did_you_mean

        raise ConfigError(f'benchmark "{name}" does not exist.{did_you_mean(name, names)} Known: {", ".join(names)}.')
    result = import_module(f"freight.bench.{name}").run(_parsed(options or []))
    _table(result)
    if as_json:
        say(json.dumps(result))


def benchmarks() -> list[str]:
    """Names of the modules in `freight.bench` that measure: those with a function `run`."""
    return [name for name in _modules() if any(_is_run(node) for node in _tree(name).body)]


def _is_run(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "run"


def _modules() -> list[str]:
    import freight.bench

    return [module.name for module in iter_modules(freight.bench.__path__) if not module.ispkg]


def _tree(name: str) -> ast.Module:
    """The parsed source: nothing is imported to list what there is."""
    return ast.parse(files("freight.bench").joinpath(f"{name}.py").read_text(encoding="utf-8"))


def _first_line(name: str) -> str:
    return (ast.get_docstring(_tree(name)) or "").split("\n", 1)[0]


def _parsed(options: list[str]) -> dict[str, Any]:
    import yaml

    from freight.config.yaml_text import read_value

    parsed: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f'option "{option}" is not `key=value`. Write for example `repeats=5`.')
        try:
            parsed[key] = read_value(value)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ConfigError(
                f'option "{option}": the value is broken YAML. Quote it, for example `{key}="..."`.'
            ) from None
    return parsed


def _table(result: dict[str, Any]) -> None:
    width = max((len(key) for key in result), default=0)
    for key, value in result.items():
        if not isinstance(value, (dict, list)):
            say(f"{key:{width}}  {value:.3f}" if isinstance(value, float) else f"{key:{width}}  {value}")
