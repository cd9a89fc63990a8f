"""Digests see content, not times, caches or the order of the directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from omni_image.content import tree_digest


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pkg/sub").mkdir(parents=True)
    (tmp_path / "pkg/a.py").write_text("a = 1\n")
    (tmp_path / "pkg/sub/b.sh").write_text("true\n")
    return tmp_path


def test_times_and_caches_do_not_matter(tree: Path) -> None:
    before = tree_digest(tree, ["pkg"])
    os.utime(tree / "pkg/a.py", (1, 1))
    (tree / "pkg/__pycache__").mkdir()
    (tree / "pkg/__pycache__/a.cpython-311.pyc").write_bytes(b"x")
    assert tree_digest(tree, ["pkg"]) == before


@pytest.mark.parametrize("change", ["content", "name", "mode", "new"])
def test_content_matters(tree: Path, change: str) -> None:
    before = tree_digest(tree, ["pkg"])
    match change:
        case "content":
            (tree / "pkg/a.py").write_text("a = 2\n")
        case "name":
            (tree / "pkg/a.py").rename(tree / "pkg/c.py")
        case "mode":
            (tree / "pkg/sub/b.sh").chmod(0o755)
        case "new":
            (tree / "pkg/empty").touch()
    assert tree_digest(tree, ["pkg"]) != before


def test_bytes_do_not_move_between_files(tree: Path) -> None:
    (tree / "one").mkdir()
    (tree / "one/x").write_text("ab")
    (tree / "one/y").write_text("c")
    before = tree_digest(tree, ["one"])
    (tree / "one/x").write_text("a")
    (tree / "one/y").write_text("bc")
    assert tree_digest(tree, ["one"]) != before


def test_absent_source_is_named(tree: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        tree_digest(tree, ["absent"])
