"""Digests of files: what names an image. Reads the checkout and writes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

#: Never part of an image, hence never part of its name.
IGNORED_FOLDERS = frozenset({"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"})
IGNORED_SUFFIXES = (".pyc", ".pyo", ".swp")


def is_content(path: Path) -> bool:
    """Whether a file belongs into an image, judged by its path below the folder that is copied."""
    return not IGNORED_FOLDERS.intersection(path.parts) and not path.name.endswith(IGNORED_SUFFIXES)


def files_below(folder: Path) -> Iterator[Path]:
    """Files of a folder that are content, in a fixed order; relative paths."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and is_content(relative):
            yield relative


def tree_digest(root: Path, names: Iterable[str]) -> str:
    """sha256 of the files and folders `names` below `root`: relative paths, executable bits and bytes, not times.

    Raises FileNotFoundError when one of them is absent.
    """
    digest = hashlib.sha256()
    for name in names:
        start = root / name
        if not start.exists():
            raise FileNotFoundError(f"{start} is needed to build an image and does not exist")
        members = [Path(name) / below for below in files_below(start)] if start.is_dir() else [Path(name)]
        for member in members:
            path = root / member
            mode = "x" if path.stat().st_mode & 0o100 else "-"
            digest.update(f"{member.as_posix()}\0{mode}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def text_digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
