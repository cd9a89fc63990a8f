"""Archives carry the name a pod uses, and only the layers that a node lacks."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from omni_image import layout

NAME = "docker.io/omni-operator/cpu:dev-1234abcd"


def put(folder: Path, content: bytes) -> str:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    path = layout.blob_path(folder, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return digest


def add_image(folder: Path, name: str, *layers: bytes) -> list[str]:
    digests = [put(folder, content) for content in layers]
    config = put(folder, f"config of {name}".encode())
    sizes = [{"digest": digest, "size": len(content)} for digest, content in zip(digests, layers, strict=True)]
    manifest = put(folder, json.dumps({"config": {"digest": config}, "layers": sizes}).encode())
    index = folder / "index.json"
    entries = json.loads(index.read_text())["manifests"] if index.exists() else []
    entries.append({"digest": manifest, "size": 1, "annotations": {layout.REF_NAME: name}})
    index.write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    return digests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "layout"
    add_image(target, NAME, b"debian", b"packages", b"application")
    return target


def test_archive_is_named_for_containerd(folder: Path, tmp_path: Path) -> None:
    add_image(folder, "docker.io/omni-operator/cpu:dev-other", b"debian", b"other")
    archive = tmp_path / "image.tar"
    size = layout.write_archive(folder, NAME, archive)
    assert size == archive.stat().st_size
    with tarfile.open(archive) as read:
        index = json.loads(read.extractfile("index.json").read())  # type: ignore[union-attr]
        blobs = {f"sha256:{Path(name).name}" for name in read.getnames() if name.startswith("blobs/")}
    image = layout.find_image(folder, NAME)
    assert [entry["annotations"][layout.CONTAINERD_NAME] for entry in index["manifests"]] == [NAME]
    assert blobs == {image.descriptor["digest"], image.config, *image.layers}


def test_a_linked_image_shares_its_blobs(folder: Path, tmp_path: Path) -> None:
    add_image(folder, "docker.io/omni-operator/cpu:dev-other", b"debian", b"other")
    view = tmp_path / "view"
    layout.link_image(folder, NAME, view)
    image = layout.find_image(view, NAME)
    assert layout.image_names(view) == (NAME,)
    assert image.layers == layout.find_image(folder, NAME).layers
    assert layout.blob_path(view, image.layers[0]).samefile(layout.blob_path(folder, image.layers[0]))
    assert len(list(view.glob("blobs/*/*"))) == 5, "no blob of the other image"


def test_an_image_with_a_lost_layer_does_not_count(folder: Path) -> None:
    layout.blob_path(folder, layout.find_image(folder, NAME).layers[1]).unlink()
    with pytest.raises(layout.NoSuchImage, match="is gone"):
        layout.find_image(folder, NAME)


def test_absent_image_and_absent_layout(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(layout.NoSuchImage):
        layout.find_image(folder, "docker.io/omni-operator/cpu:dev-other")
    assert layout.image_names(tmp_path / "nothing") == ()


def test_prune_keeps_shared_layers(folder: Path) -> None:
    newer = "docker.io/omni-operator/cpu:dev-newer"
    shared = add_image(folder, newer, b"debian", b"packages", b"newer application")
    freed = layout.prune(folder, [newer])
    assert freed > 0
    assert layout.image_names(folder) == (newer,)
    assert layout.find_image(folder, newer).layers == tuple(shared)
    assert not any(path.read_bytes() == b"application" for path in folder.glob("blobs/*/*"))
