"""Images without a registry: archives in, nodes' containerd out. Nothing is sent that a node already has.

Reads OCI archives, OCI layout folders, docker archives and images of the local buildah store, and writes the
small images of a single static program that the cluster itself needs.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from omni_cluster.errors import ClusterError, InvalidArgument, MissingPrerequisite, StepFailed

SOURCE_LABEL = "dev.omni.source"
_NAME_ANNOTATION = "io.containerd.image.name"
_REF_ANNOTATION = "org.opencontainers.image.ref.name"


def normalize(name: str) -> str:
    """The full name that kubelet looks for: `app` is docker.io/library/app:latest, as in every container tool."""
    head, _, rest = name.partition("/")
    if not rest:
        name = f"docker.io/library/{name}"
    elif not ("." in head or ":" in head or head == "localhost"):
        name = f"docker.io/{name}"
    last = name.rsplit("/", 1)[-1]
    return name if ":" in last or "@" in last else f"{name}:latest"


@dataclass(frozen=True, slots=True)
class Source:
    """An image to load: where its bytes are, its name in the cluster, and what identifies its content."""

    path: Path
    name: str
    identity: str
    is_oci: bool
    stored_as: str = ""
    """Name inside a docker archive, which is imported as it is; '' for an OCI archive, whose name is rewritten."""


def write_static_image(target: Path, name: str, program: Path, entrypoint: tuple[str, ...], user: str) -> None:
    """An OCI archive of one static program and nothing else, uncompressed. Equal inputs give equal bytes."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder in ("tmp", "etc"):
            tar.addfile(_entry(folder, 0, tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755))
        content = program.read_bytes()
        tar.addfile(_entry(program.name, len(content), tarfile.REGTYPE, 0o755), io.BytesIO(content))
    plain = layer.getvalue()
    config = json.dumps(
        {
            "architecture": _architecture(),
            "os": "linux",
            "config": {"Entrypoint": list(entrypoint), "User": user, "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [_sha(plain)]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", plain)],
        }
    ).encode()
    entry = {
        **_descriptor("application/vnd.oci.image.manifest.v1+json", manifest),
        "annotations": {_NAME_ANNOTATION: normalize(name), _REF_ANNOTATION: normalize(name)},
    }
    with tarfile.open(target, "w") as tar:
        files = [("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')]
        files += [(f"blobs/sha256/{_sha(blob)[7:]}", blob) for blob in (config, manifest, plain)]
        files.append(("index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()))
        for path, blob in files:
            tar.addfile(_entry(path, len(blob), tarfile.REGTYPE, 0o644), io.BytesIO(blob))


def describe(path: Path, name_as: str | None) -> Source:
    """Name and identity of an archive or layout. Raises InvalidArgument when it is none or has no name."""
    index = _read_member(path, "index.json")
    manifest = index or _read_member(path, "manifest.json")
    if manifest is None:
        raise InvalidArgument(
            "IMAGE",
            str(path),
            "is neither an OCI nor a docker archive",
            "make one with `buildah push NAME oci-archive:FILE`",
        )
    parsed = json.loads(manifest)
    if index is not None:
        entries: list[dict[str, Any]] = parsed["manifests"]
        if len(entries) != 1:
            raise InvalidArgument("IMAGE", str(path), f"holds {len(entries)} images", "load archives of one image each")
        notes = entries[0].get("annotations") or {}
        found, identity = notes.get(_NAME_ANNOTATION) or notes.get(_REF_ANNOTATION), str(entries[0]["digest"])
    else:
        found, identity = (parsed[0].get("RepoTags") or [None])[0], _sha(manifest)
    name = name_as or found
    if not name:
        raise InvalidArgument("IMAGE", str(path), "has no name inside", "give one with --as NAME:TAG")
    if index is None and not found:
        raise InvalidArgument("IMAGE", str(path), "is a docker archive without a name", "save it with its name")
    return Source(
        path, normalize(name), identity, index is not None, "" if index is not None else normalize(str(found))
    )


def export_from_buildah(image: str, folder: Path) -> Path:
    """The image as an OCI layout, uncompressed: compressing costs minutes and the copy is local."""
    _require_buildah(image)
    target = folder / "layout"
    argv = ["buildah", "push", "--quiet", "--disable-compression", image, f"oci:{target}:{normalize(image)}"]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise StepFailed(f"buildah cannot give the image {image}: {done.stderr.strip()[-400:]}")
    return target


def buildah_identity(image: str) -> str:
    """Identity of an image in the local buildah store. Raises ClusterError when there is none."""
    _require_buildah(image)
    argv = ["buildah", "inspect", "--type", "image", "--format", "{{.FromImageID}}", image]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"there is no file and no buildah image {image!r}: {done.stderr.strip()[-300:]}")
    return f"buildah:{done.stdout.strip()}"


def as_archive(image: str, name_as: str | None, folder: Path) -> Path:
    """A file that `kind load image-archive` takes."""
    path = Path(image)
    if path.is_file() and name_as is None:
        return path
    layout = path if path.exists() else export_from_buildah(image, folder)
    source = describe(layout, name_as)
    target = folder / "image.tar"
    with target.open("wb") as stream:
        write_filtered(source, set(), stream)
    return target


def write_filtered(source: Source, present: set[str], out: IO[bytes]) -> int:
    """Copy the archive without the blobs in `present` and under its name here; returns bytes left out."""
    if not source.is_oci:
        with source.path.open("rb") as stream:
            shutil.copyfileobj(stream, out, 1 << 20)
        return 0
    left_out = 0
    with tarfile.open(fileobj=out, mode="w|") as tar:
        for name, size, content_stream in _members(source.path):
            if name == "index.json":
                content = _rename(content_stream.read(), source.name)
                tar.addfile(_entry(name, len(content), tarfile.REGTYPE, 0o644), io.BytesIO(content))
            elif name.startswith("blobs/") and name.removeprefix("blobs/").replace("/", ":") in present:
                left_out += size
            else:
                tar.addfile(_entry(name, size, tarfile.REGTYPE, 0o644), content_stream)
    return left_out


def _rename(index: bytes, name: str) -> bytes:
    parsed = json.loads(index)
    notes = parsed["manifests"][0].setdefault("annotations", {})
    notes[_NAME_ANNOTATION] = notes[_REF_ANNOTATION] = name
    return json.dumps(parsed).encode()


def _members(path: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    if path.is_dir():
        for file in sorted(item for item in path.rglob("*") if item.is_file()):
            with file.open("rb") as stream:
                yield str(file.relative_to(path)), file.stat().st_size, stream
        return
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isfile() and (content := tar.extractfile(member)) is not None:
                yield member.name.removeprefix("./"), member.size, content


def _read_member(path: Path, name: str) -> bytes | None:
    if path.is_dir():
        file = path / name
        return file.read_bytes() if file.is_file() else None
    try:
        for found, _, stream in _members(path):
            if found == name:
                return stream.read()
    except tarfile.TarError:
        return None
    return None


def _require_buildah(image: str) -> None:
    if shutil.which("buildah") is None:
        raise MissingPrerequisite(
            f"{image!r} is no file, and buildah is not installed to look for an image of that name: "
            "`apt-get install buildah`, or give an OCI archive"
        )


def _entry(name: str, size: int, kind: bytes, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.mode = size, kind, mode
    return info


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _sha(blob), "size": len(blob)}


def _sha(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
