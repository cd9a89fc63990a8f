"""OCI image layouts: looking up an image, and writing the archive that a node imports.

All images of a machine share one layout, so that a layer is stored once however many images have it.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REF_NAME = "org.opencontainers.image.ref.name"
#: containerd takes the image's name from this annotation as it stands.
CONTAINERD_NAME = "io.containerd.image.name"
_EPOCH = 0
_VERSION = json.dumps({"imageLayoutVersion": "1.0.0"})


class NoSuchImage(LookupError):
    """The layout has no image of this name."""


@dataclass(frozen=True, slots=True)
class LayoutImage:
    """One image of a layout. Digests are `sha256:...`; sizes in bytes."""

    name: str
    descriptor: dict[str, Any]
    config: str
    layers: tuple[str, ...]
    size: int


def blob_path(layout: Path, digest: str) -> Path:
    algorithm, _, value = digest.partition(":")
    return layout / "blobs" / algorithm / value


def image_names(layout: Path) -> tuple[str, ...]:
    """Names of all images; empty for a layout that does not exist."""
    return tuple(entry.get("annotations", {}).get(REF_NAME, "") for entry in _index(layout))


def find_image(layout: Path, name: str) -> LayoutImage:
    """Raises NoSuchImage when the name is absent or a file of it is."""
    for entry in _index(layout):
        if entry.get("annotations", {}).get(REF_NAME) != name:
            continue
        try:
            manifest = json.loads(blob_path(layout, entry["digest"]).read_bytes())
        except FileNotFoundError as error:
            raise NoSuchImage(f"{layout} names {name}, but its manifest is gone") from error
        layers = tuple(layer["digest"] for layer in manifest["layers"])
        for digest in (manifest["config"]["digest"], *layers):
            if not blob_path(layout, digest).exists():
                raise NoSuchImage(f"{layout} names {name}, but {digest} is gone")
        return LayoutImage(
            name, entry, manifest["config"]["digest"], layers, sum(layer["size"] for layer in manifest["layers"])
        )
    raise NoSuchImage(f"{layout} has no image {name}")


def link_image(layout: Path, name: str, folder: Path) -> None:
    """Make `folder` a layout of this one image, with hard links to its blobs: gigabytes are not copied to be read once.

    Raises NoSuchImage; OSError when `folder` is on another file system.
    """
    image = find_image(layout, name)
    for digest in dict.fromkeys((image.descriptor["digest"], image.config, *image.layers)):
        target = blob_path(folder, digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(blob_path(layout, digest), target)
    (folder / "oci-layout").write_text(_VERSION)
    (folder / "index.json").write_text(_single_index(image))


def write_archive(layout: Path, name: str, archive: Path) -> int:
    """Write one image as an OCI archive, to copy to a registry or another machine; returns its bytes."""
    image = find_image(layout, name)
    unfinished = archive.with_name(f".{archive.name}.{os.getpid()}")
    try:
        with tarfile.open(unfinished, "w", format=tarfile.PAX_FORMAT) as out:
            _add_text(out, "oci-layout", _VERSION)
            _add_text(out, "index.json", _single_index(image))
            for digest in dict.fromkeys((image.descriptor["digest"], image.config, *image.layers)):
                path = blob_path(layout, digest)
                out.add(path, arcname=path.relative_to(layout).as_posix(), filter=_anonymous)
        os.replace(unfinished, archive)
    finally:
        unfinished.unlink(missing_ok=True)
    return archive.stat().st_size


def prune(layout: Path, keep: Iterable[str]) -> int:
    """Forget every image that is not in `keep` and delete blobs that no image has; returns the bytes freed."""
    kept_names = set(keep)
    kept = [entry for entry in _index(layout) if entry.get("annotations", {}).get(REF_NAME) in kept_names]
    used: set[str] = set()
    for entry in kept:
        image = find_image(layout, entry["annotations"][REF_NAME])
        used |= {entry["digest"], image.config, *image.layers}
    _write_index(layout, kept)
    freed = 0
    for path in layout.glob("blobs/*/*"):
        if f"{path.parent.name}:{path.name}" not in used:
            freed += path.stat().st_size
            path.unlink()
    return freed


def _single_index(image: LayoutImage) -> str:
    descriptor = {**image.descriptor, "annotations": {REF_NAME: image.name, CONTAINERD_NAME: image.name}}
    return json.dumps({"schemaVersion": 2, "manifests": [descriptor]})


def _index(layout: Path) -> list[dict[str, Any]]:
    try:
        manifests: list[dict[str, Any]] = json.loads((layout / "index.json").read_bytes())["manifests"] or []
    except FileNotFoundError:
        return []
    return manifests


def _write_index(layout: Path, manifests: list[dict[str, Any]]) -> None:
    if not (layout / "index.json").exists():
        return
    unfinished = layout / f".index.{os.getpid()}"
    unfinished.write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
    os.replace(unfinished, layout / "index.json")


def _add_text(out: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text.encode())
    member.mtime = _EPOCH
    out.addfile(member, io.BytesIO(text.encode()))


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = _EPOCH
    return member
