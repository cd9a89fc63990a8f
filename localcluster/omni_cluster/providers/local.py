"""Our own cluster on this machine: processes from pinned Go modules, nodes in namespaces. No Docker needed."""

from __future__ import annotations

import os
import sys

from omni_cluster.build import HYPER, ensure_tool
from omni_cluster.control_plane import STOP_ORDER, Layout, ensure_control_plane, probes, read_ports
from omni_cluster.errors import ClusterError
from omni_cluster.paths import cluster_dir
from omni_cluster.processes import Supervisor
from omni_cluster.progress import step
from omni_cluster.providers.base import Availability, ComponentStatus, UpRequest
from omni_cluster.state import ClusterState, ProviderName, save_state


class LocalProvider:
    """etcd to kubelet, all ours."""

    def availability(self) -> Availability:
        if not sys.platform.startswith("linux"):
            return Availability(False, f"nodes of our own need Linux, this is {sys.platform}")
        if os.geteuid() != 0:
            return Availability(False, "nodes of our own need root")
        return Availability(True, "our own node on this machine")

    def up(self, request: UpRequest, old: ClusterState | None, reason: str) -> ClusterState:
        root = cluster_dir(request.name)
        state = ClusterState(
            request.name, ProviderName.LOCAL, str(root / "kubeconfig"), reason, nodes=0, control_plane_only=True
        )
        save_state(state)
        hyper = ensure_tool(HYPER)
        ensure_control_plane(_layout(state), Supervisor(root), hyper)
        return state

    def down(self, state: ClusterState) -> None:
        with step("stop processes"):
            Supervisor(state.root).stop_all(STOP_ORDER)

    def status(self, state: ClusterState) -> tuple[ComponentStatus, ...]:
        layout, supervisor = _layout(state), Supervisor(state.root)
        ports = read_ports(layout)
        if ports is None:
            return (ComponentStatus("control plane", "was never started; run `omni cluster up`"),)
        found = []
        for component, probe in probes(layout, ports).items():
            record, process = supervisor.record(component), supervisor.alive(component)
            problem = probe.problem() if process else "not running"
            log = str(record.log) if record else None
            found.append(ComponentStatus(component, problem, process.pid if process else None, log))
        return tuple(found)

    def load(self, state: ClusterState, image: str, name_as: str | None) -> None:
        raise ClusterError("this cluster has no nodes")


def _layout(state: ClusterState) -> Layout:
    return Layout(state.name, state.root)
