"""Archives in and out without a registry."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from omni_cluster.errors import ClusterError, InvalidArgument
from omni_cluster.images import Source, describe, normalize, write_filtered, write_static_image
from omni_cluster.node_images import parse_images
from omni_cluster.providers.local import load_into


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    program = tmp_path / "pause"
    program.write_bytes(b"\x7fELF" + b"x" * 5000)
    target = tmp_path / "pause.tar"
    write_static_image(target, "localhost/omni/pause:1", program, ("/pause",), "65535:65535")
    return target


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("app", "docker.io/library/app:latest"),
        ("me/app:1", "docker.io/me/app:1"),
        ("localhost/app", "localhost/app:latest"),
        ("reg.example:5000/a/b", "reg.example:5000/a/b:latest"),
        ("reg.example/a@sha256:1", "reg.example/a@sha256:1"),
    ],
)
def test_names_as_kubelet_reads_them(name, full):
    assert normalize(name) == full


def test_equal_programs_give_equal_archives(archive: Path, tmp_path: Path):
    again = tmp_path / "again.tar"
    write_static_image(again, "localhost/omni/pause:1", tmp_path / "pause", ("/pause",), "65535:65535")
    assert again.read_bytes() == archive.read_bytes()


def test_blobs_that_a_node_has_are_left_out_and_the_name_is_ours(archive: Path):
    with tarfile.open(archive) as tar:
        blobs = {m.name: m.size for m in tar if m.name.startswith("blobs/")}
    biggest = max(blobs, key=lambda name: blobs[name])
    source = describe(archive, "other:2")
    out = io.BytesIO()
    saved = write_filtered(source, {biggest.removeprefix("blobs/").replace("/", ":")}, out)
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        names = tar.getnames()
        index = json.loads(tar.extractfile("index.json").read())
    assert saved == blobs[biggest]
    assert biggest not in names
    assert set(blobs) - {biggest} < set(names)
    assert index["manifests"][0]["annotations"]["io.containerd.image.name"] == "docker.io/library/other:2"


def test_a_layout_folder_is_read_like_an_archive(archive: Path, tmp_path: Path):
    folder = tmp_path / "layout"
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    assert describe(folder, None).identity == describe(archive, None).identity
    assert describe(folder, None).name == "localhost/omni/pause:1"


def test_docker_archive_is_passed_on_as_it_is(tmp_path: Path):
    target = tmp_path / "docker.tar"
    manifest = json.dumps([{"Config": "c", "RepoTags": ["app:1"], "Layers": []}]).encode()
    with tarfile.open(target, "w") as tar:
        info = tarfile.TarInfo("manifest.json")
        info.size = len(manifest)
        tar.addfile(info, io.BytesIO(manifest))
    source, out = describe(target, None), io.BytesIO()
    assert (source.name, source.is_oci, source.stored_as) == (
        "docker.io/library/app:1",
        False,
        "docker.io/library/app:1",
    )
    write_filtered(source, set(), out)
    assert out.getvalue() == target.read_bytes()


@pytest.mark.parametrize("content", [b"", b"not a tar at all" * 100])
def test_something_else_is_refused(tmp_path: Path, content):
    file = tmp_path / "x"
    file.write_bytes(content)
    with pytest.raises(InvalidArgument, match="neither an OCI nor a docker archive"):
        describe(file, None)


def test_listing_of_ctr():
    listing = (
        "REF TYPE DIGEST SIZE PLATFORMS LABELS\n"
        "localhost/a:1 application/x sha256:1 1.2 MiB linux/amd64 dev.omni.source=buildah:5,io.cri-containerd.image=managed \n"
        "sha256:9 application/x sha256:2 1.2 MiB linux/amd64 - \n"
    )
    found = parse_images(listing)
    assert (found["localhost/a:1"].digest, found["localhost/a:1"].source) == ("sha256:1", "buildah:5")
    assert found["sha256:9"].source == ""


class FakeStore:
    def __init__(self, has: bool) -> None:
        self._has, self.loaded = has, []

    def has(self, name: str, identity: str) -> bool:
        return self._has

    def load(self, source: Source, identity: str) -> int:
        self.loaded.append(source.name)
        return 0


def test_only_nodes_that_lack_the_image_get_it(archive: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path))
    stores = {"n1": FakeStore(True), "n2": FakeStore(False)}
    load_into(stores, str(archive), None)  # type: ignore[arg-type]
    assert (stores["n1"].loaded, stores["n2"].loaded) == ([], ["localhost/omni/pause:1"])


def test_neither_file_nor_image(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path))
    with pytest.raises(ClusterError):
        load_into({"n1": FakeStore(False)}, "no-such-image-here", None)  # type: ignore[dict-item]
