"""Conversations made of Python sources: real answers, split by module, the same every time."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from freight.bench.conversations import standard_library, write_conversations, write_modules

SOURCE = '''
"""A module."""

def plain(a, b=2, *rest, c: int = 3, **more) -> str:
    """Adds.

    Twice.
    """
    def inner():
        """Part of plain."""
        return 1
    return a + b


def silent(a):
    return a


class Box:
    """A class is no function."""

    @property
    def size(self):
        """Its size."""
        return 1

    async def wait(self):
        """Waits."""
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    (root / "pack" / "tests").mkdir(parents=True)
    (root / "pack" / "__init__.py").write_text(SOURCE)
    (root / "pack" / "tests" / "test_it.py").write_text(SOURCE)
    (root / "broken.py").write_text("def f(:\n")
    (root / "bytes.py").write_bytes(b'def f():\n    """\xff."""\n')
    return root


def test_one_conversation_per_documented_function(library: Path) -> None:
    found = [(c.module, c.name) for c in standard_library(library)]
    assert found == [("bytes", "f"), ("pack", "plain"), ("pack", "Box.size"), ("pack", "Box.wait")]


def test_the_question_has_module_signature_and_docstring_and_the_answer_is_the_source(library: Path) -> None:
    plain, size, wait = list(standard_library(library))[1:]
    assert "`plain` of the Python module `pack`" in plain.question
    assert "def plain(a, b=2, *rest, c: int=3, **more) -> str" in plain.question
    assert "Adds.\n\nTwice." in plain.question
    assert plain.answer.startswith("def plain(") and plain.answer.endswith("return a + b")
    assert "def inner" in plain.answer
    assert size.answer.startswith("@property\ndef size(self):")
    assert "async def wait(self)" in wait.question
    for conversation in (plain, size, wait):
        ast.parse(conversation.answer)


def test_no_module_is_in_both_files_and_writing_twice_gives_the_same_bytes(library: Path, tmp_path: Path) -> None:
    for number in range(60):
        (library / f"m{number}.py").write_text(SOURCE)
    paths = write_conversations(tmp_path / "a", library)
    again = write_conversations(tmp_path / "b", library)
    modules = []
    for path, other in zip(paths, again, strict=True):
        assert path.read_bytes() == other.read_bytes()
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert all([m["role"] for m in r["messages"]] == ["user", "assistant"] for r in records)
        modules.append({r["module"] for r in records})
    trained, held_out = modules
    assert trained and held_out and not trained & held_out


def test_modules_are_written_whole_and_without_tests(library: Path, tmp_path: Path) -> None:
    (library / "empty.py").write_text("\n")
    lines = write_modules(tmp_path / "out", library).read_text(encoding="utf-8").splitlines()
    broken, undecodable, whole = [json.loads(line)["text"] for line in lines]
    assert (broken, whole) == ("def f(:\n", SOURCE)
    assert "\ufffd" in undecodable
