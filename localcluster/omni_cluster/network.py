"""Addresses and interfaces of a local cluster.

Each node lives in a network namespace of its own, joined to a bridge of its cluster by one veth pair:

    host (10.200.0.1) -- bridge omni-br0 -- veth omni0n1 | eth0 10.200.0.11 (node n1, pods 10.244.1.0/24)
                                         `- veth omni0n2 | eth0 10.200.0.12 (node n2, pods 10.244.2.0/24)

So kube-proxy's rules, CNI's interfaces and every packet filter of a node die with its namespace, several
clusters fit on one machine, and nothing of the host's own packet filter is touched. Nodes have no default
route: a packet to a Service or pod that is gone never leaves the machine.
"""

from __future__ import annotations

import ipaddress
import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from omni_cluster.errors import ClusterError, StepFailed

MAX_CLUSTERS = 10
BRIDGE_PREFIX = "omni-br"


@dataclass(frozen=True, slots=True)
class ClusterNetwork:
    """Every address of the cluster with this index (0 to 9)."""

    index: int

    @property
    def bridge(self) -> str:
        return f"{BRIDGE_PREFIX}{self.index}"

    @property
    def node_cidr(self) -> str:
        return f"10.{200 + self.index}.0.0/24"

    @property
    def host_address(self) -> str:
        """Address of this machine on the bridge; the API server advertises it."""
        return f"10.{200 + self.index}.0.1"

    @property
    def service_cidr(self) -> str:
        return f"10.{96 + self.index}.0.0/16"

    @property
    def api_service_ip(self) -> str:
        return f"10.{96 + self.index}.0.1"

    @property
    def dns_service_ip(self) -> str:
        return f"10.{96 + self.index}.0.10"

    @property
    def pod_cidr(self) -> str:
        return f"10.{244 + self.index}.0.0/16"

    @property
    def kwok_pod_cidr(self) -> str:
        """Addresses that simulated pods report: inside the pod range, so that nothing is sent outside for them."""
        return f"10.{244 + self.index}.192.1/18"

    def node_address(self, number: int) -> str:
        """Address of node n<number>, counted from 1."""
        return f"10.{200 + self.index}.0.{10 + number}"

    def node_pod_cidr(self, number: int) -> str:
        """Pod addresses of node n<number>."""
        return f"10.{244 + self.index}.{number}.0/24"

    def veth(self, number: int) -> str:
        """Host end of the node's veth pair."""
        return f"omni{self.index}n{number}"

    @property
    def ranges(self) -> tuple[str, ...]:
        return (self.node_cidr, self.service_cidr, self.pod_cidr)


def choose_index(taken: Iterable[int], routes: Iterable[str]) -> int:
    """The first index whose ranges nobody on this machine routes to. Raises ClusterError when there is none."""
    used = set(taken)
    foreign = [ipaddress.ip_network(route, strict=False) for route in routes]
    foreign = [network for network in foreign if network.version == 4 and network.prefixlen > 0]
    for index in range(MAX_CLUSTERS):
        ours = [ipaddress.ip_network(text) for text in ClusterNetwork(index).ranges]
        if index not in used and not any(a.overlaps(b) for a in ours for b in foreign):
            return index
    raise ClusterError(
        f"no free address ranges for another cluster: {len(used)} clusters exist and the rest of "
        f"10.96-105, 10.200-209, 10.244-253 is routed elsewhere ({', '.join(map(str, foreign)) or 'nothing'}); "
        "remove a cluster with `omni cluster down --name NAME`"
    )


def host_routes(ignore_interfaces: Iterable[str] = ()) -> tuple[str, ...]:
    """Destinations in this machine's routing table, without those over the given interfaces."""
    ignored = set(ignore_interfaces)
    found = json.loads(run("ip", "-json", "-4", "route", "show", "table", "all") or "[]")
    return tuple(
        route["dst"] for route in found
        if route.get("dst", "default") != "default" and route.get("dev") not in ignored
        and route.get("type", "unicast") in ("unicast", "local")
    )  # fmt: skip


def plan_bridge(network: ClusterNetwork, existing: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """`ip` commands that make the bridge and its routes; harmless when repeated."""
    bridge = network.bridge
    make = [] if bridge in set(existing) else [("link", "add", bridge, "type", "bridge")]
    via = ("via", network.node_address(1), "dev", bridge, "onlink")
    return (
        *make,
        ("addr", "replace", f"{network.host_address}/24", "dev", bridge),
        ("link", "set", bridge, "up"),
        ("route", "replace", network.service_cidr, *via),
        ("route", "replace", network.pod_cidr, *via),
    )


def plan_veth(network: ClusterNetwork, number: int, holder_pid: int) -> tuple[str, ...]:
    """`ip` command that makes the veth pair of a node, one end in the holder's namespace."""
    return ("link", "add", network.veth(number), "type", "veth", "peer", "name", "eth0", "netns", str(holder_pid))


def plan_node_host_side(network: ClusterNetwork, number: int) -> tuple[tuple[str, ...], ...]:
    """`ip` commands on the host that join a node's veth to the bridge and route its pods to it."""
    via = ("via", network.node_address(number), "dev", network.bridge, "onlink")
    return (
        ("link", "set", network.veth(number), "master", network.bridge, "up"),
        ("route", "replace", network.node_pod_cidr(number), *via),
    )


def plan_node_inside(network: ClusterNetwork, number: int) -> tuple[tuple[str, ...], ...]:
    """`ip` commands inside a node's namespace: its address, nothing else."""
    return (
        ("link", "set", "lo", "up"),
        ("addr", "replace", f"{network.node_address(number)}/24", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
    )


def plan_peer_routes(network: ClusterNetwork, number: int, nodes: int) -> tuple[tuple[str, ...], ...]:
    """`ip` commands inside node n<number>: how to reach the pods of the other nodes."""
    return tuple(
        ("route", "replace", network.node_pod_cidr(peer), "via", network.node_address(peer), "dev", "eth0")
        for peer in range(1, nodes + 1)
        if peer != number
    )


def run(*argv: str) -> str:
    """Run a short command. Raises StepFailed with what it said."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise StepFailed(f"`{' '.join(argv)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def apply(commands: Iterable[Sequence[str]], inside: Sequence[str] = ()) -> None:
    """Run `ip` commands in order, inside a namespace when `inside` (an nsenter prefix) is given."""
    for command in commands:
        run(*inside, "ip", *command)


def interfaces() -> tuple[str, ...]:
    """Names of this machine's interfaces."""
    return tuple(item["ifname"] for item in json.loads(run("ip", "-json", "link", "show")))


def remove(network: ClusterNetwork) -> None:
    """Delete the bridge (its routes go with it) and every veth that is left."""
    prefix = network.veth(0)[:-1]
    for name in interfaces():
        if name == network.bridge or (name.startswith(prefix) and name.removeprefix(prefix).isdigit()):
            subprocess.run(["ip", "link", "delete", name], capture_output=True, timeout=30)
