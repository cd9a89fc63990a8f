"""Kubernetes in Docker, where a Docker engine really answers. `kind` itself is built from its Go module."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from omni_cluster.build import KIND, ensure_client_tools, ensure_tool
from omni_cluster.errors import InvalidArgument
from omni_cluster.probe import wait_until
from omni_cluster.progress import step
from omni_cluster.providers.base import Availability, ComponentStatus, UpRequest
from omni_cluster.providers.existing import first_line, server_version
from omni_cluster.providers.kind_tool import load_into_kind, run_logged
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
        ensure_client_tools()
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
            run_logged(
                "create cluster with kind", state,
                [str(kind), "create", "cluster", "--name", _cluster_name(state), "--config", str(config),
                 "--kubeconfig", str(kubeconfig), "--wait", "180s"],
            )  # fmt: skip
        else:
            run_logged(
                "write kubeconfig", state,
                [str(kind), "export", "kubeconfig", "--name", _cluster_name(state), "--kubeconfig", str(kubeconfig)],
            )  # fmt: skip
            with step("API server ready") as waiting_for:
                wait_until("the API server answers", lambda: _api_problem(state), seconds=90, show=waiting_for)
        return state

    def down(self, state: ClusterState) -> None:
        kind = ensure_tool(KIND)
        run_logged("delete cluster with kind", state, [str(kind), "delete", "cluster", "--name", _cluster_name(state)])

    def status(self, state: ClusterState) -> tuple[ComponentStatus, ...]:
        return (ComponentStatus("API server", _api_problem(state)),)

    def load(self, state: ClusterState, image: str, name_as: str | None) -> None:
        load_into_kind(_cluster_name(state), state, image, name_as)

    def _clusters(self, kind: Path) -> list[str]:
        return subprocess.run([kind, "get", "clusters"], capture_output=True, text=True, timeout=30).stdout.split()


def _cluster_name(state: ClusterState) -> str:
    return f"omni-{state.name}"


def _api_problem(state: ClusterState) -> str | None:
    try:
        server_version(Path(state.kubeconfig))
    except Exception as error:  # noqa: BLE001 - the client library raises anything; all of it means "does not answer"
        return first_line(error)
    return None
