"""Prepares an image's Python environment on the host, from the packages that `make setup` has downloaded.

The result is a virtual environment for Debian's /usr/bin/python3.11: no interpreter of the host is copied. Files are hard links
into uv's cache where possible, so nothing may be changed in place, only replaced.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from omni_cluster.errors import MissingPrerequisite
from omni_cluster.paths import cache_dir
from omni_cluster.progress import say, step
from omni_image import process, stubs

INTERPRETER = "/usr/bin/python3.11"
SITE_PACKAGES = "lib/python3.11/site-packages"
#: Never read on CPUs, or only by compilers that the image does not have.
SUPERFLUOUS_ON_CPU = (
    "triton",
    "triton-*.dist-info",
    "nvidia_*.dist-info",
    "cuda_toolkit-*.dist-info",
    "torch/include",
    "torch/share",
    "torch/bin/protoc*",
    "torch/bin/*test*",
    "torch/lib/*.a",
    "torch/lib/libtorch_cuda_linalg.so",
    "mooncake/mooncake_client",
    "mooncake/mooncake_master",
    "mooncake/transfer_engine_bench",
)


def find_uv() -> Path:
    """uv of the pinned version, as `make setup` left it in the cache folder."""
    candidates = sorted(cache_dir().glob("boot-uv-*/bin/uv"))
    if candidates:
        return candidates[-1]
    found = shutil.which("uv")
    if found is None:
        raise MissingPrerequisite("uv is neither in the cache folder nor on PATH; run `make setup`")
    return Path(found)


def prepare(destination: Path, pins: Sequence[str], *, stub_cuda: bool, log: Path) -> None:
    """Fill `destination`, an absent folder, with a virtual environment that has exactly `pins`."""
    packages = destination / SITE_PACKAGES
    packages.mkdir(parents=True)
    requirements = destination / "requirements.txt"
    requirements.write_text("\n".join(pins) + "\n")
    command = [str(find_uv()), "pip", "install", "--no-deps", "--link-mode=hardlink", "--target", str(packages)]
    with step(f"{len(pins)} Python packages") as waiting_for:
        process.run([*command, "-r", str(requirements)], log=log, waiting_for=waiting_for)
    requirements.unlink()
    for name in (
        "bin",
        "share",
        "include",
        "etc",
        "man",
        ".lock",
    ):  # scripts and data files, with paths of this machine
        path = packages / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    if stub_cuda:
        with step("CUDA libraries -> stubs") as waiting_for:
            saved = stubs.replace_cuda_libraries(packages, waiting_for)
            saved += remove(packages, SUPERFLUOUS_ON_CPU)
        say(f"    {saved / 1e9:.1f} GB smaller")
    binaries = destination / "bin"
    binaries.mkdir()
    (binaries / "python3.11").symlink_to(INTERPRETER)
    (binaries / "python3").symlink_to("python3.11")
    (binaries / "python").symlink_to("python3.11")
    (destination / "pyvenv.cfg").write_text(
        f"home = {Path(INTERPRETER).parent}\ninclude-system-site-packages = false\nexecutable = {INTERPRETER}\n"
    )


def remove(packages: Path, patterns: Sequence[str]) -> int:
    """Delete what matches; returns the bytes."""
    saved = 0
    for pattern in patterns:
        for path in packages.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                saved += sum(member.lstat().st_size for member in path.rglob("*") if not member.is_dir())
                shutil.rmtree(path)
            else:
                saved += path.lstat().st_size
                path.unlink()
    return saved
