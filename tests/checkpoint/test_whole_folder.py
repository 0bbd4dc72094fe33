"""Folders that are replaced whole: whatever fails between the two renames, the old one comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from freight.checkpoint.whole_folder import REPLACED, UNFINISHED, whole_folder


def folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def test_the_old_folder_comes_back_when_the_second_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = folder(tmp_path / "model", "old")
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if self.name.endswith(UNFINISHED):
            raise OSError("no")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no"), whole_folder(target) as unfinished:
        (unfinished / "file").write_text("new")
    assert (target / "file").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_old_folder_comes_back_after_a_kill_between_the_renames(tmp_path: Path):
    target = tmp_path / "model"
    folder(tmp_path / f".model{REPLACED}", "old")
    with pytest.raises(RuntimeError), whole_folder(target):
        raise RuntimeError
    assert (target / "file").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
