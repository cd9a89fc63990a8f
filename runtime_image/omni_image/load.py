"""Hands a built image to a cluster of `omni cluster`, which sends its nodes only the layers that they lack."""

from __future__ import annotations

from omni_cluster import providers
from omni_cluster.state import exclusive, load_state
from omni_image import process
from omni_image.build import scratch
from omni_image.engines import Engine


def load_image(engine: Engine, image: str, cluster: str) -> None:
    """Import an image on every node of a cluster. Raises ClusterError when that fails."""
    name = image if image.startswith("docker.io/") else f"docker.io/{image}"
    with scratch("export") as folder, exclusive(cluster):
        state = load_state(cluster)
        source = engine.export(name, folder, process.log_path("export"))
        providers.of(state).load(state, str(source), name)
