"""The namespace of a node: its own network and its own view of mounts, held open by one small process.

`ip netns exec` is not used because it remounts /sys, which hides the control groups from containerd's shims.
When the last process of a node ends, the kernel removes its interfaces, packet filter rules and mounts.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from omni_cluster import network, proc
from omni_cluster.hostsettings import PRIVATE_FOLDERS
from omni_cluster.network import ClusterNetwork
from omni_cluster.probe import wait_until
from omni_cluster.processes import ProcessSpec, Supervisor


def component(node: str) -> str:
    """Name of the process that holds a node's namespace."""
    return f"{node}/namespace"


def render_setup(node_root: Path) -> str:
    """Shell text that runs inside the new namespace and then becomes the holder.

    Mounts of the host still arrive, none of ours leave; within the node they are shared, as kubelet wants.
    """
    lines = ["mount --make-rshared /"]
    for folder in PRIVATE_FOLDERS:
        source = node_root / "private" / folder.strip("/").replace("/", "-")
        lines += [f"mkdir -p {shlex.quote(str(source))}", f"mount --bind {shlex.quote(str(source))} {folder}"]
    return "\n".join([*lines, 'exec "$@"'])


def build_holder(node: str, node_root: Path, log: Path, pause: Path) -> ProcessSpec:
    """The process that holds the namespace."""
    prefix = ("unshare", "--net", "--mount", "--propagation", "slave", "--", "sh", "-ec", render_setup(node_root), "sh")
    return ProcessSpec(component(node), (str(pause), node), log, prefix)


def enter(supervisor: Supervisor, node: str) -> tuple[str, ...]:
    """Prefix that runs a program inside a node; the program replaces it."""
    process = supervisor.alive(component(node))
    if process is None:
        supervisor.require_alive(component(node))
        raise AssertionError("unreachable")
    return ("nsenter", f"--net=/proc/{process.pid}/ns/net", f"--mount=/proc/{process.pid}/ns/mnt", "--")


def ensure_namespace(
    supervisor: Supervisor, spec: ProcessSpec, addresses: ClusterNetwork, number: int, nodes: int
) -> None:
    """Make the namespace of node n<number> with its interface and routes, as far as that is still to be done.

    A new namespace means that whatever ran in an old one must be started anew: `enter()` gives another prefix
    then, and the supervisor restarts what has a changed prefix.
    """
    node = f"n{number}"
    supervisor.ensure(spec)
    process = supervisor.alive(spec.component)
    assert process is not None, "ensure() raises when the holder does not run"

    def not_set_up() -> str | None:
        supervisor.require_alive(spec.component)
        return None if proc.command_line(process.pid) == spec.argv else "mounts are being set up"

    wait_until(f"namespace of {node}", not_set_up, seconds=10, log=spec.log)
    inside = enter(supervisor, node)
    if not _has_interface(inside):
        stale = addresses.veth(number)
        if stale in network.interfaces():
            network.run("ip", "link", "delete", stale)
        network.apply([network.plan_veth(addresses, number, process.pid)])
    network.apply(network.plan_node_host_side(addresses, number))
    network.apply(network.plan_node_inside(addresses, number), inside)
    network.apply(network.plan_peer_routes(addresses, number, nodes), inside)
    network.run(*inside, "sysctl", "-qw", "net.ipv4.ip_forward=1")


def _has_interface(inside: tuple[str, ...]) -> bool:
    return '"eth0"' in network.run(*inside, "ip", "-json", "link", "show")
