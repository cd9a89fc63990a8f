"""The base image where no registry is at hand: Debian by debootstrap, made small, imported under a local name.

With Docker and a registry nobody needs this: BASE of the Dockerfiles defaults to a public image.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from omni_cluster.errors import MissingPrerequisite
from omni_cluster.prerequisites import ensure_packages
from omni_cluster.progress import step
from omni_image import process

SUITE = "bookworm"
PACKAGES = ("python3.11", "ca-certificates")
#: Not read at run time. Copyright files stay.
SUPERFLUOUS = (
    "usr/share/locale/*",
    "usr/share/man/*",
    "usr/share/info/*",
    "usr/share/lintian/*",
    "var/cache/apt/*.bin",
    "var/cache/debconf/*-old",
    "var/lib/apt/lists/*",
    "var/log/*",
)
#: Keeps what apt-get installs later as small as the rest.
DPKG_EXCLUDES = """\
path-exclude=/usr/share/doc/*
path-include=/usr/share/doc/*/copyright
path-exclude=/usr/share/locale/*
path-exclude=/usr/share/man/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/lintian/*
"""


def recipe() -> str:
    """Everything that decides what the base image contains, as text."""
    return "\n".join((SUITE, *PACKAGES, *SUPERFLUOUS, DPKG_EXCLUDES))


def prepare_rootfs(destination: Path, log: Path) -> None:
    """Fill `destination` with a root file system. Needs root, debootstrap and Debian's mirror (or a proxy of it)."""
    try:
        ensure_packages({"debootstrap": "debootstrap"})
    except MissingPrerequisite as error:
        raise MissingPrerequisite(
            f"the base image is made by debootstrap here: {error}. Or give one with `omni image build --base IMAGE`"
        ) from None
    destination.mkdir(parents=True, exist_ok=True)
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(destination)]
    with step(f"Debian {SUITE} by debootstrap") as waiting_for:
        process.run(command, log=log, waiting_for=waiting_for)
    excludes = destination / "etc/dpkg/dpkg.cfg.d/omni-slim"
    excludes.write_text(DPKG_EXCLUDES)
    for pattern in SUPERFLUOUS:
        for path in destination.glob(pattern):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in (destination / "usr/share/doc").glob("*/*"):
        if path.name != "copyright" and not path.is_symlink():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for archive in (destination / "var/cache/apt/archives").glob("*.deb"):
        archive.unlink()
