"""Kubernetes in Docker, where a Docker engine really answers. `kind` itself is built from its Go module."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from omni_cluster.build import HELM, HYPER, KIND, ensure_tool
from omni_cluster.errors import InvalidArgument, StepFailed
from omni_cluster.images import as_archive
from omni_cluster.paths import cache_dir
from omni_cluster.probe import wait_until
from omni_cluster.progress import step
from omni_cluster.providers.base import Availability, ComponentStatus, UpRequest
from omni_cluster.state import ClusterState, ProviderName, save_state


def render_config(nodes: int) -> str:
    """kind's cluster file: one control plane that also runs pods, the others workers."""
    roles = ["control-plane"] + ["worker"] * (nodes - 1)
    return json.dumps(
        {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": [{"role": role} for role in roles]}
    )


class KindProvider:
    """Runs `kind`; the cluster is named omni-NAME there."""

    def availability(self) -> Availability:
        if not shutil.which("docker"):
            return Availability(False, "no docker command")
        try:
            found = subprocess.run(
                ["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, timeout=5
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Availability(False, f"the Docker engine does not answer ({error})")
        if found.returncode != 0 or not found.stdout.strip():
            why = (found.stderr.strip().splitlines() or ["no answer"])[-1][:120]
            return Availability(False, f"the Docker engine does not answer ({why})")
        return Availability(True, f"a Docker engine {found.stdout.strip()} answers")

    def up(self, request: UpRequest, old: ClusterState | None, reason: str) -> ClusterState:
        if request.control_plane_only:
            raise InvalidArgument("--provider", "kind", "cannot run a control plane only", "use --provider local")
        if request.kwok_nodes:
            raise InvalidArgument("--kwok-nodes", request.kwok_nodes, "needs our own nodes", "use --provider local")
        kind = ensure_tool(KIND)
        ensure_tool(HYPER)
        ensure_tool(HELM)
        state = old or ClusterState(request.name, ProviderName.KIND, "", reason, nodes=request.nodes or 1)
        if old and request.nodes not in (None, old.nodes):
            raise InvalidArgument(
                "--nodes",
                request.nodes,
                f"but the cluster has {old.nodes}",
                f"`omni cluster down --name {old.name}` first",
            )
        kubeconfig = state.root / "kubeconfig"
        state = ClusterState(state.name, ProviderName.KIND, str(kubeconfig), state.reason, nodes=state.nodes)
        save_state(state)
        if _cluster_name(state) not in self._clusters(kind):
            config = state.root / "kind.json"
            config.write_text(render_config(state.nodes))
            _run(
                "create cluster with kind", state,
                [str(kind), "create", "cluster", "--name", _cluster_name(state), "--config", str(config),
                 "--kubeconfig", str(kubeconfig), "--wait", "180s"],
            )  # fmt: skip
        else:
            _run(
                "write kubeconfig", state,
                [str(kind), "export", "kubeconfig", "--name", _cluster_name(state), "--kubeconfig", str(kubeconfig)],
            )  # fmt: skip
            with step("API server ready") as waiting_for:
                wait_until("the API server answers", lambda: _api_problem(state), seconds=90, show=waiting_for)
        return state

    def down(self, state: ClusterState) -> None:
        kind = ensure_tool(KIND)
        _run("delete cluster with kind", state, [str(kind), "delete", "cluster", "--name", _cluster_name(state)])

    def status(self, state: ClusterState) -> tuple[ComponentStatus, ...]:
        return (ComponentStatus("API server", _api_problem(state)),)

    def load(self, state: ClusterState, image: str, name_as: str | None) -> None:
        kind = ensure_tool(KIND)
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="load-") as folder:
            archive = as_archive(image, name_as, Path(folder))
            _run(
                f"load {image}", state,
                [str(kind), "load", "image-archive", str(archive), "--name", _cluster_name(state)],
            )  # fmt: skip

    def _clusters(self, kind: Path) -> list[str]:
        return subprocess.run([kind, "get", "clusters"], capture_output=True, text=True, timeout=30).stdout.split()


def _cluster_name(state: ClusterState) -> str:
    return f"omni-{state.name}"


def _api_problem(state: ClusterState) -> str | None:
    argv = [str(ensure_tool(HYPER)), "kubectl", "--kubeconfig", state.kubeconfig, "get", "--raw", "/readyz"]
    try:
        found = subprocess.run(argv, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return "no answer in 10 s"
    return None if found.returncode == 0 else (found.stderr.strip() or "no answer")[-200:]


def _run(what: str, state: ClusterState, argv: list[str]) -> None:
    log = state.root / "logs" / "kind.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with step(what), log.open("ab") as stream:
        if subprocess.run(argv, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL).returncode != 0:
            raise StepFailed(f"{what} failed", log)
