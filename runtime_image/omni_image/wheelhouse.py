"""Wheels of an image, complete and with the tested versions: for builds that reach no package index."""

from __future__ import annotations

from pathlib import Path

from omni_cluster.errors import MissingPrerequisite, StepFailed
from omni_cluster.paths import cache_dir
from omni_cluster.progress import step
from omni_image import build, process


def find_pip() -> Path:
    """An interpreter that has pip: the one beside uv in the cache folder."""
    candidates = sorted(cache_dir().glob("boot-uv-*/bin/python"))
    if not candidates:
        raise MissingPrerequisite("there is no pip in the cache folder; run `make setup`")
    return candidates[-1]


def download(extra: str, folder: Path, python: str = "3.11") -> int:
    """Put the wheels of one extra into `folder`, for an image with this Python; returns how many there are.

    Raises StepFailed when a package has no wheel: nothing is compiled in an image.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pins = build.pins_of(extra)
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(pins) + "\n")
    log = process.log_path(f"wheelhouse-{extra}")
    command = [str(find_pip()), "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--dest", str(folder)]
    with step(f"{len(pins)} wheels") as waiting_for:
        process.run([*command, "-r", str(requirements)], log=log, waiting_for=waiting_for)
    count = len(list(folder.glob("*.whl")))
    if count < len(pins):
        raise StepFailed(f"{folder} has {count} wheels for {len(pins)} packages; an old file may be in the way", log)
    return count
