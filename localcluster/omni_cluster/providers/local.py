"""Our own cluster on this machine: processes from pinned Go modules, nodes in namespaces. No Docker needed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from omni_cluster import cgroups, hostsettings, kwok, namespace, network
from omni_cluster import control_plane as plane
from omni_cluster import node as nodes_
from omni_cluster.build import CONTAINERD, COREDNS, CTR, HELM, HYPER, KWOK, PAUSE, SHIM, ensure_tool
from omni_cluster.control_plane import STOP_ORDER, Layout
from omni_cluster.dns import build_dns
from omni_cluster.errors import ClusterError, InvalidArgument
from omni_cluster.images import Source, buildah_identity, describe, export_from_buildah, normalize, write_static_image
from omni_cluster.kubectl import Kubectl, deployment_problem, node_problem
from omni_cluster.network import ClusterNetwork
from omni_cluster.node import Node, Programs
from omni_cluster.node_images import ImageStore
from omni_cluster.paths import cache_dir, cluster_dir, clusters_dir
from omni_cluster.prerequisites import ensure_node_prerequisites
from omni_cluster.probe import wait_until
from omni_cluster.processes import Supervisor
from omni_cluster.progress import say, step
from omni_cluster.providers.base import Availability, ComponentStatus, UpRequest
from omni_cluster.state import UNKNOWN_INDEX, ClusterState, ProviderName, all_states, machine_lock, save_state


class LocalProvider:
    """etcd to kubelet, all ours."""

    def availability(self) -> Availability:
        if not sys.platform.startswith("linux"):
            return Availability(False, f"nodes of our own need Linux, this is {sys.platform}")
        if os.geteuid() != 0:
            return Availability(False, "nodes of our own need root")
        return Availability(True, "our own node on this machine")

    def up(self, request: UpRequest, old: ClusterState | None, reason: str) -> ClusterState:
        state = plan_state(request, old, reason)
        if state.control_plane_only:
            save_state(state)
            plane.ensure_control_plane(_layout(state), Supervisor(state.root), ensure_tool(HYPER))
            return state
        ensure_node_prerequisites()
        hyper = ensure_tool(HYPER)
        programs = Programs(hyper, *(ensure_tool(tool) for tool in (CONTAINERD, SHIM, CTR, PAUSE)))
        coredns = ensure_tool(COREDNS)
        ensure_tool(HELM)
        state = _claim_index(state, old)
        addresses, supervisor = ClusterNetwork(state.index), Supervisor(state.root)
        with step("network"):
            network.apply(network.plan_bridge(addresses, network.interfaces()))
        _remove_surplus_nodes(state, supervisor)
        ports = plane.ensure_control_plane(_layout(state), supervisor, hyper)
        pause_image, dns_image = _static_name(programs.pause, "pause"), _static_name(coredns, "coredns")
        with step(f"{state.nodes} node{'s' if state.nodes > 1 else ''} started"):
            for node in _nodes(state):
                nodes_.ensure_runtime(node, state.nodes, supervisor, programs, pause_image)
                _ensure_static_image(node, programs.ctr, pause_image, programs.pause, "65535:65535")
                if node.number == 1:
                    _ensure_static_image(node, programs.ctr, dns_image, coredns, "65532:65532")
                nodes_.ensure_kubelet(node, ports, supervisor, programs)
        kubectl = Kubectl(hyper, Path(state.kubeconfig))
        _wait_for_nodes(state, supervisor, kubectl)
        _ensure_dns(addresses, dns_image, kubectl)
        if state.kwok_nodes or supervisor.record(kwok.COMPONENT):
            kwok.ensure_kwok(state.kwok_nodes, _layout(state), ports, addresses, supervisor, kubectl, ensure_tool(KWOK))
        return state

    def down(self, state: ClusterState) -> None:
        supervisor = Supervisor(state.root)
        with step("stop processes"):
            supervisor.stop(kwok.COMPONENT)
            if not state.control_plane_only:
                for number in range(state.nodes, 0, -1):
                    nodes_.stop_node(replace_number(state, number), supervisor)
                for group in cgroups.groups_of(state.name):
                    cgroups.remove_group(group)
            supervisor.stop_all(STOP_ORDER)
        if not state.control_plane_only:
            with machine_lock():
                for index in _indexes(state):
                    network.remove(ClusterNetwork(index))
        refuse_mounts(state.root, Path("/proc/self/mountinfo").read_text())
        shutil.rmtree(state.root)
        with machine_lock():
            # Clusters of another cache folder are not in our states, but their bridges are on this machine.
            bridges = any(name.startswith(network.BRIDGE_PREFIX) for name in network.interfaces())
            if not bridges and not any(_has_nodes(other) for other in all_states()):
                hostsettings.restore()

    def status(self, state: ClusterState) -> tuple[ComponentStatus, ...]:
        layout, supervisor = _layout(state), Supervisor(state.root)
        ports = plane.read_ports(layout)
        if ports is None:
            return (ComponentStatus("control plane", "was never started; run `omni cluster up`"),)
        checks: dict[str, Callable[[], str | None]] = {
            component: probe.problem for component, probe in plane.probes(layout, ports).items()
        }
        if not state.control_plane_only:
            ctr = ensure_tool(CTR)
            for node in _nodes(state):
                checks[namespace.component(node.name)] = lambda: None
                checks[node.component("containerd")] = partial(nodes_.containerd_problem, node, ctr)
                checks |= {component: probe.problem for component, probe in nodes_.probes(node).items()}
        if state.kwok_nodes:
            checks[kwok.COMPONENT] = lambda: None
        found = []
        for component, problem in checks.items():
            record, process = supervisor.record(component), supervisor.alive(component)
            found.append(
                ComponentStatus(
                    component, problem() if process else "not running", process.pid if process else None,
                    str(record.log) if record else None,
                )
            )  # fmt: skip
        return tuple(found)

    def load(self, state: ClusterState, image: str, name_as: str | None) -> None:
        if state.control_plane_only:
            raise ClusterError(f"cluster {state.name!r} has no nodes to load an image into; `omni cluster up` adds one")
        ctr = ensure_tool(CTR)
        stores = {node.name: ImageStore(ctr, node.socket) for node in _nodes(state)}
        load_into(stores, image, name_as)


def fail_node(state: ClusterState, name: str, how: str) -> None:
    """Take a node away (`stop`: every process of it; `cut`: its network). Raises InvalidArgument for what is not there."""
    nodes = {node.name: node for node in _nodes(state)} if state.provider is ProviderName.LOCAL else {}
    if name not in nodes:
        known = ", ".join(nodes) or "none: the cluster is not local or has no nodes"
        raise InvalidArgument("NODE", name, "is no node of our own", f"use one of {known}")
    if how not in ("stop", "cut"):
        raise InvalidArgument("--how", how, "is unknown", "use stop or cut")
    node = nodes[name]
    with step(f"{how} {name}"):
        if how == "stop":
            nodes_.stop_node(node, Supervisor(state.root))
        else:
            network.run("ip", "link", "set", node.addresses.veth(node.number), "down")


def load_into(stores: dict[str, ImageStore], image: str, name_as: str | None) -> None:
    """Import an archive or a buildah image into every store that lacks it."""
    path = Path(image)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="load-") as folder:
        if path.exists():
            source = describe(path, name_as)
            identity = source.identity
        else:
            identity = buildah_identity(image)
            source = Source(Path(folder), normalize(name_as or image), identity, True)
        waiting = {node: store for node, store in stores.items() if not store.has(source.name, identity)}
        if not waiting:
            say(f"  ✓ {source.name} is already on every node")
            return
        if not path.exists():
            with step(f"export {image}"):
                source = replace(describe(export_from_buildah(image, Path(folder)), None), name=source.name)
        for node, store in waiting.items():
            with step(f"load {source.name} into {node}"):
                store.load(source, identity)


def refuse_mounts(root: Path, mountinfo: str) -> None:
    """Never delete through a mount: it may lead to somebody's files. Raises ClusterError naming it."""
    points = [line.split()[4].replace("\\040", " ") for line in mountinfo.splitlines()]
    inside = [point for point in points if point == str(root) or point.startswith(f"{root}/")]
    if inside:
        raise ClusterError(f"something is still mounted at {inside[0]}; `umount {inside[0]}`, then run `down` again")


def replace_number(state: ClusterState, number: int) -> Node:
    """Node n<number> of a cluster."""
    return Node(_layout(state), ClusterNetwork(state.index), number)


def plan_state(request: UpRequest, old: ClusterState | None, reason: str) -> ClusterState:
    """What the cluster is to be: the request, and where it says nothing what the cluster was."""
    if request.control_plane_only and (request.nodes or request.kwok_nodes):
        raise InvalidArgument("--control-plane-only", True, "contradicts --nodes and --kwok-nodes", "drop one of them")
    if request.control_plane_only and old is not None and not old.control_plane_only:
        raise InvalidArgument(
            "--control-plane-only", True, f"but cluster {old.name!r} has nodes", "use another --name for it"
        )
    for text in request.kwok_nodes or ():
        kwok.parse_class(text)
    had_nodes = old is not None and not old.control_plane_only
    return ClusterState(
        name=request.name,
        provider=ProviderName.LOCAL,
        kubeconfig=str(cluster_dir(request.name) / "kubeconfig"),
        reason=reason,
        index=old.index if old else 0,
        nodes=0 if request.control_plane_only else request.nodes or (old.nodes if old and had_nodes else 1),
        control_plane_only=request.control_plane_only,
        kwok_nodes=request.kwok_nodes if request.kwok_nodes is not None else old.kwok_nodes if old else (),
    )


def _claim_index(state: ClusterState, old: ClusterState | None) -> ClusterState:
    """Choose the address ranges once and keep them. One cluster at a time chooses."""
    with machine_lock():
        if old is not None and not old.control_plane_only:
            save_state(state)
            hostsettings.prepare()
            return state
        others = [other for other in all_states() if _has_nodes(other) and other.name != state.name]
        ours = [ClusterNetwork(other.index).bridge for other in others]
        index = network.choose_index([other.index for other in others], network.host_routes(ours))
        state = replace(state, index=index)
        save_state(state)
        hostsettings.prepare()
    return state


def _has_nodes(state: ClusterState) -> bool:
    return state.provider is ProviderName.LOCAL and not state.control_plane_only


def _layout(state: ClusterState) -> Layout:
    if state.control_plane_only:
        return Layout(state.name, state.root)
    addresses = ClusterNetwork(state.index)
    return Layout(
        state.name, state.root, addresses.service_cidr, addresses.api_service_ip, addresses.pod_cidr,
        addresses.host_address,
    )  # fmt: skip


def _indexes(state: ClusterState) -> tuple[int, ...]:
    """The index of a cluster; when its state was lost, every index that no other cluster has."""
    if state.index != UNKNOWN_INDEX:
        return (state.index,)
    taken = {other.index for other in all_states() if _has_nodes(other)}
    return tuple(index for index in range(network.MAX_CLUSTERS) if index not in taken)


def _nodes(state: ClusterState) -> tuple[Node, ...]:
    return tuple(replace_number(state, number) for number in range(1, state.nodes + 1))


def _remove_surplus_nodes(state: ClusterState, supervisor: Supervisor) -> None:
    """Nodes of an earlier `up` with more of them."""
    for folder in sorted((state.root / "nodes").glob("n*")):
        number = int(folder.name[1:]) if folder.name[1:].isdigit() else 0
        if number > state.nodes:
            with step(f"remove node {folder.name}"):
                nodes_.stop_node(replace_number(state, number), supervisor)
                refuse_mounts(folder, Path("/proc/self/mountinfo").read_text())
                shutil.rmtree(folder)


def _static_name(program: Path, name: str) -> str:
    """Image name of a built program; the tag is the hash of its sources, so a new build is a new image."""
    return f"localhost/omni/{name}:{program.parent.name.removeprefix(name + '-')}"


def _ensure_static_image(node: Node, ctr: Path, name: str, program: Path, user: str) -> None:
    store = ImageStore(ctr, node.socket)
    if name in store.images():
        return
    with tempfile.TemporaryDirectory(dir=clusters_dir(), prefix=".image-") as folder:
        archive = Path(folder) / "image.tar"
        write_static_image(archive, name, program, (f"/{program.name}",), user)
        source = describe(archive, None)
        store.load(source, source.identity)


def _wait_for_nodes(state: ClusterState, supervisor: Supervisor, kubectl: Kubectl) -> None:
    for node in _nodes(state):
        with step(f"node {node.name} Ready") as waiting_for:

            def problem(node: Node = node) -> str | None:
                for program in ("containerd", "kubelet", "kube-proxy"):
                    supervisor.require_alive(node.component(program))
                found = [item for item in kubectl.get("nodes")["items"] if item["metadata"]["name"] == node.name]
                return node_problem(found[0]) if found else "kubelet has not registered yet"

            wait_until(
                f"node {node.name} is Ready", problem, seconds=120, log=node.log("kubelet"), show=waiting_for
            )  # fmt: skip
    wanted = {node.name for node in _nodes(state)}
    for item in kubectl.get("nodes")["items"]:
        name, labels = item["metadata"]["name"], item["metadata"].get("labels", {})
        if name not in wanted and labels.get("type") != kwok.NODE_TYPE:
            kubectl.run("delete", "node", name)


def _ensure_dns(addresses: ClusterNetwork, image: str, kubectl: Kubectl) -> None:
    with step("cluster DNS ready") as waiting_for:
        kubectl.apply(build_dns(addresses, image))
        wait_until(
            "CoreDNS is available",
            lambda: deployment_problem(kubectl.get("-n", "kube-system", "deployment", "coredns")),
            seconds=120,
            show=waiting_for,
        )
