"""runtime_image/install/slim.py: what stays in a small image and what goes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "runtime_image/install/slim.py"


@pytest.fixture(scope="module")
def slim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("omni_image_slim", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(packages: Path, name: str, *files: str) -> None:
    info = f"{name}-1.0.dist-info"
    for file in (*files, f"{info}/METADATA"):
        if not file.startswith(".."):
            (packages / file).parent.mkdir(parents=True, exist_ok=True)
            (packages / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (packages / info / "RECORD").write_text("".join(f"{file},,\n" for file in (*files, f"{info}/METADATA")))


def left(packages: Path) -> set[str]:
    return {path.relative_to(packages).as_posix() for path in packages.rglob("*") if path.is_file()}


def test_what_is_not_named_goes_with_all_that_was_made_of_it(slim: ModuleType, tmp_path: Path) -> None:
    install(tmp_path, "Keep_Me", "keep/__init__.py", "shared/a.py", "_keep.so")
    install(tmp_path, "other", "other/__init__.py", "shared/b.py", "other.py", "../../../bin/other")
    (tmp_path / "other/__pycache__").mkdir()
    (tmp_path / "other/__pycache__/x.pyc").write_text("")
    (tmp_path / "own.pth").write_text("")
    slim.slim(tmp_path, ["keep-me"])
    info = "Keep_Me-1.0.dist-info"
    assert left(tmp_path) == {
        "keep/__init__.py", "shared/a.py", "shared/b.py", "_keep.so", f"{info}/METADATA", f"{info}/RECORD", "own.pth",
    }  # fmt: skip


def test_servers_and_second_copies_of_mooncake_go(slim: ModuleType, tmp_path: Path) -> None:
    libs = "mooncake_transfer_engine_non_cuda.libs"
    install(tmp_path, "mooncake", "mooncake/engine.so", "mooncake/libasio.so", f"{libs}/libglog-1.so")
    slim.slim(tmp_path, ["mooncake"])
    kept = left(tmp_path)
    for file in ("mooncake/store.so", "mooncake/mooncake_master", f"{libs}/libasio-1.so"):
        (tmp_path / file).write_text("")
    slim.slim(tmp_path, ["mooncake"])
    assert left(tmp_path) == kept


def test_a_name_that_is_not_installed_fails_the_build(slim: ModuleType, tmp_path: Path) -> None:
    install(tmp_path, "here", "here.py")
    with pytest.raises(SystemExit, match="not installed: gone"):
        slim.slim(tmp_path, ["here", "gone"])
    assert "here.py" in left(tmp_path)
