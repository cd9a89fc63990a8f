"""Hands a built image to a cluster of `omni cluster`, without the layers that its nodes have."""

from __future__ import annotations

import os
from pathlib import Path

from omni_cluster.progress import say, step
from omni_image import process
from omni_image.build import images_dir
from omni_image.engines import Engine
from omni_image.plan import REPOSITORY


def full_name(image: str) -> str:
    return image if image.startswith("docker.io/") else f"docker.io/{image}"


def archive_path(image: str) -> Path:
    return images_dir() / f"{image.removeprefix(REPOSITORY).replace('/', '_').replace(':', '_')}-{os.getpid()}.tar"


def load_image(engine: Engine, image: str, cluster: str) -> None:
    """Import an image on every node of a cluster. Raises ClusterError when that fails."""
    from omni_cluster import load

    name = full_name(image)
    known = frozenset(load.stored_blobs(cluster)) if engine.layers(name) else frozenset[str]()
    archive = archive_path(image)
    archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        with step(f"archive of {image}"):
            size = engine.archive(name, archive, known, process.log_path("archive"))
        say(f"    {size / 1e6:.1f} MB to import")
        load.load_archive(cluster, archive)
    finally:
        archive.unlink(missing_ok=True)
