"""The programs that build images: Docker where its daemon answers, else Buildah (no daemon, no registry).

Both build the same Dockerfiles from the same context folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from omni_cluster.errors import MissingPrerequisite
from omni_cluster.paths import cache_dir
from omni_cluster.prerequisites import ensure_packages
from omni_image import layout, process
from omni_image.plan import short_name

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Build:
    """One build. `final` images are what clusters load; the others are only built upon."""

    dockerfile: Path
    context: Path
    target: str
    image: str
    arguments: Mapping[str, str]
    final: bool
    log: Path


class Engine(Protocol):
    """What the build needs of a container engine. Names of images are full (`docker.io/...`)."""

    name: str

    def images(self) -> frozenset[str]:
        """Names of all images that it has."""
        ...

    def import_rootfs(self, rootfs: Path, image: str, log: Path) -> None:
        """Make an image of one layer from a folder."""
        ...

    def build(self, build: Build, progress: Progress) -> None: ...

    def export(self, image: str, folder: Path, log: Path) -> Path:
        """What `omni cluster` loads, made in the empty `folder`: an OCI layout or an archive of one image."""
        ...

    def size(self, image: str) -> int:
        """Bytes of an image's layers, uncompressed."""
        ...


class Buildah:
    """Buildah with chroot isolation: runs where no container runtime may. Final images go to one shared OCI layout."""

    name = "buildah"

    def __init__(self, oci_layout: Path | None = None) -> None:
        self.layout = oci_layout or cache_dir() / "images" / "layout"
        self._environment = {"BUILDAH_ISOLATION": "chroot"}

    def images(self) -> frozenset[str]:
        listed = process.capture(["buildah", "images", "--json"], environment=self._environment) or "[]"
        names = {name for image in json.loads(listed or "[]") or [] for name in image.get("names") or []}
        return frozenset(names | {name for name in layout.image_names(self.layout) if self._complete(name)})

    def _complete(self, name: str) -> bool:
        try:
            layout.find_image(self.layout, name)
        except layout.NoSuchImage:
            return False
        return True

    def import_rootfs(self, rootfs: Path, image: str, log: Path) -> None:
        container = (process.capture(["buildah", "from", "scratch"]) or "").strip()
        try:
            mount = (process.capture(["buildah", "mount", container]) or "").strip()
            process.run(["cp", "-a", f"{rootfs}/.", f"{mount}/"], log=log)
            process.run(["buildah", "unmount", container], log=log)
            process.run(["buildah", "commit", "--format", "oci", "--disable-compression", container, image], log=log)
        finally:
            process.capture(["buildah", "rm", container])

    def build(self, build: Build, progress: Progress) -> None:
        self.layout.parent.mkdir(parents=True, exist_ok=True)
        # Layers stay uncompressed: compressing gigabytes for an import on the same machine costs minutes.
        destination = f"oci:{self.layout}:{build.image}" if build.final else build.image
        command = ["buildah", "bud", "--format", "oci", "--disable-compression", "--pull-never"]
        command += ["--target", build.target, "--file", str(build.dockerfile), "--tag", destination]
        for name, value in build.arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        process.run([*command, str(build.context)], log=build.log, waiting_for=progress, environment=self._environment)

    def export(self, image: str, folder: Path, log: Path) -> Path:
        layout.link_image(self.layout, image, folder)
        return folder

    def size(self, image: str) -> int:
        return layout.find_image(self.layout, image).size


class Docker:
    """The Docker daemon with BuildKit, which caches the tiers below by itself as well."""

    name = "docker"

    def images(self) -> frozenset[str]:
        listed = process.capture(["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"]) or ""
        return frozenset(f"docker.io/{line}" for line in listed.split() if line.startswith("omni-operator/"))

    def import_rootfs(self, rootfs: Path, image: str, log: Path) -> None:
        archive = rootfs.with_suffix(".tar")
        try:
            process.run(["tar", "--numeric-owner", "-C", str(rootfs), "-cf", str(archive), "."], log=log)
            process.run(["docker", "import", str(archive), short_name(image)], log=log)
        finally:
            archive.unlink(missing_ok=True)

    def build(self, build: Build, progress: Progress) -> None:
        command = ["docker", "build", "--target", build.target, "--file", str(build.dockerfile)]
        command += ["--tag", short_name(build.image)]
        for name, value in build.arguments.items():
            command += ["--build-arg", f"{name}={value.removeprefix('docker.io/')}"]
        process.run(
            [*command, str(build.context)], log=build.log, waiting_for=progress, environment={"DOCKER_BUILDKIT": "1"}
        )

    def export(self, image: str, folder: Path, log: Path) -> Path:
        archive = folder / "image.tar"
        process.run(["docker", "save", "--output", str(archive), short_name(image)], log=log)
        return archive

    def size(self, image: str) -> int:
        text = process.capture(["docker", "image", "inspect", "--format", "{{.Size}}", short_name(image)]) or "0"
        return int(text.strip() or 0)


def find_engine(wanted: str = "auto") -> Engine:
    """The engine to use; Buildah is installed where that is possible. Raises MissingPrerequisite when none works here."""
    if wanted in ("auto", "docker") and process.capture(
        ["docker", "version", "--format", "{{.Server.Version}}"], deadline=10
    ):
        return Docker()
    if wanted not in ("auto", "buildah"):
        raise MissingPrerequisite(f"the engine {wanted!r} does not work here; use --engine auto, docker or buildah")
    try:
        ensure_packages({"buildah": "buildah"})
    except MissingPrerequisite as error:
        raise MissingPrerequisite(f"no container engine: start Docker, or install Buildah: {error}") from None
    return Buildah()
