"""Real conversations that are always at hand: the Python standard library explains itself.

Every function with a docstring becomes one: the user asks for the function given its module, signature and docstring,
the assistant answers with the real source. Nothing is downloaded, the records are the same on every run of one Python
version, and their lengths are skewed like chat data (most short, a long tail), which is what packing is for. About one
module in ten is held out, by the hash of its name, so no function of a held-out module is ever trained on.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Tests and the copies of other projects are not the library's own explanations.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
HELD_OUT_SHARE = 10


@dataclass(frozen=True)
class Conversation:
    """One question and its answer.

    Args:
        module: Dotted name of the module the function stands in.
        name: Qualified name of the function within the module.
        question: What the user asks.
        answer: The function's source.
    """

    module: str
    name: str
    question: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether the module belongs to the held-out part."""
        return _digest(self.module)[0] % HELD_OUT_SHARE == 0

    def record(self) -> dict[str, object]:
        """The chat record, as `messages`."""
        return {
            "messages": [
                {"role": "user", "content": self.question},
                {"role": "assistant", "content": self.answer},
            ],
            "module": self.module,
            "name": self.name,
        }


def standard_library(root: Path | None = None) -> Iterator[Conversation]:
    """Conversations about every documented function of the standard library, in order of file and line.

    Args:
        root: Folder of Python sources; by default the running interpreter's library.
    """
    for path, relative in _modules(root):
        yield from _conversations_of(path, _module_name(relative))


def write_conversations(folder: Path, root: Path | None = None) -> tuple[Path, Path]:
    """Write `train.jsonl` and `heldout.jsonl`.

    The held-out file is in the order of a hash, so that its first records are a fair sample of it.

    Args:
        folder: Made if it is not there.
        root: As for `standard_library`.

    Returns:
        The two paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[bool, list[Conversation]] = {False: [], True: []}
    for conversation in standard_library(root):
        parts[conversation.held_out].append(conversation)
    parts[True].sort(key=lambda c: _digest(f"{c.module}:{c.name}"))
    paths = folder / "train.jsonl", folder / "heldout.jsonl"
    for path, part in zip(paths, (parts[False], parts[True]), strict=True):
        path.write_text("".join(json.dumps(c.record(), ensure_ascii=False) + "\n" for c in part), encoding="utf-8")
    return paths


def write_modules(folder: Path, root: Path | None = None) -> Path:
    """Write `modules.jsonl`, the text of every module, for pretraining.

    Args:
        folder: Made if it is not there.
        root: As for `standard_library`.

    Returns:
        The path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "modules.jsonl"
    with output.open("w", encoding="utf-8") as file:
        for path, _ in _modules(root):
            text = path.read_bytes().decode("utf-8", errors="replace")
            if text.strip():
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return output


def _modules(root: Path | None) -> Iterator[tuple[Path, Path]]:
    """Sources that the library explains itself with: the file, and its path below the library."""
    root = root or Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            yield path, relative


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _conversations_of(path: Path, module: str) -> Iterator[Conversation]:
    source = path.read_bytes().decode("utf-8", errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules hold invalid escapes, which is theirs to mend
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # templates and files kept broken on purpose
    lines = source.splitlines(keepends=True)
    for name, node in _functions(tree, prefix=""):
        docstring = ast.get_docstring(node)
        if docstring:
            yield Conversation(module, name, _question(module, name, node, docstring), _source(lines, node))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child  # what is nested inside is part of its source
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _question(module: str, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, docstring: str) -> str:
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{keyword} {node.name}({ast.unparse(node.args)}){returns}"
    return f"Write `{name}` of the Python module `{module}`.\n\n{signature}\n\n{docstring}"


def _source(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()
