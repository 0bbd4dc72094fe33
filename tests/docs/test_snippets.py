"""Every YAML snippet of the docs loads, every command in them exists, every local link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from freight.cli.main import app
from freight.config.load import load_config
from freight.config.reference import SECTIONS, options_table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        found.extend((f"{page.name}-{number}", block) for number, block in enumerate(blocks))
    return found


YAML = [(name, text) for name, text in snippets("yaml") if "train" in yaml.safe_load(text)]
COMMANDS = [
    (name, line.split("#")[0].strip())
    for name, text in snippets("sh")
    for line in text.splitlines()
    if line.startswith("freight ")
]


@pytest.mark.parametrize(("name", "text"), YAML, ids=[name for name, _ in YAML])
def test_a_config_in_the_docs_loads(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    load_config(path, check_files=False)


@pytest.mark.parametrize("line", [line for _, line in COMMANDS])
def test_a_command_in_the_docs_exists_with_its_options(line: str) -> None:
    _, name, *words = line.split()
    commands = get_command(app).commands  # pyright: ignore
    assert name in commands, line
    known = {option for parameter in commands[name].params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known, line


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_local_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_there_is_something_to_check() -> None:
    assert len(YAML) >= 3
    assert len(COMMANDS) >= 8


def test_options_tables_in_the_docs_are_those_of_the_schema() -> None:
    shown = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, table in re.findall(
            r"<!-- options: ([\w.]+) -->\n(.*?)<!-- end of options -->", text, flags=re.DOTALL
        ):
            assert table.strip() == options_table(SECTIONS[name]).strip(), f"{page.name}: {name}"
            shown.append(name)
    assert "attention" in shown
