"""Runs the `kind` program, for clusters that we made with it and for those that we only use."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from omni_cluster.build import KIND, ensure_tool
from omni_cluster.errors import StepFailed
from omni_cluster.images import as_archive
from omni_cluster.paths import cache_dir
from omni_cluster.progress import step
from omni_cluster.state import ClusterState


def run_logged(what: str, state: ClusterState, argv: list[str]) -> None:
    """Run a command of kind; its output goes to the cluster's log. Raises StepFailed with the end of it."""
    log = state.root / "logs" / "kind.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with step(what), log.open("ab") as stream:
        if subprocess.run(argv, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL).returncode != 0:
            raise StepFailed(f"{what} failed", log)


def load_into_kind(cluster: str, state: ClusterState, image: str, name_as: str | None) -> None:
    """Put an image into every node of the kind cluster of this name; kind itself skips nodes that have it."""
    kind = ensure_tool(KIND)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="load-") as folder:
        archive = as_archive(image, name_as, Path(folder))
        run_logged(f"load {image}", state, [str(kind), "load", "image-archive", str(archive), "--name", cluster])
