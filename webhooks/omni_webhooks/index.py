"""Nodes by kind and by what is left of them, kept up node by node: a review of a thousand nodes looks at a few. No I/O."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable

from omni_operator.placement import NodeView
from omni_operator.placement.demand import PodDemand, selects, tolerates
from omni_operator.placement.fleet import Fleet, Kind, static_of

Rank = tuple[int, int, str]  # devices left, memory left, node
ANY = ""  # instead of a device: for pods that need none


class NodeIndex:
    """The nodes that take pods.

    labels: those that tell nodes apart, beside the ones that describe devices. Whoever asks about others has to look at
    the nodes themselves.
    """

    def __init__(self, labels: frozenset[str] = frozenset(), nodes: Iterable[NodeView] = ()) -> None:
        self.labels = labels
        self._nodes: dict[str, NodeView] = {}
        self._sorts: dict[object, _Sort] = {}  # by what stays as it is while pods come and go
        self._statics: dict[str, object] = {}
        self._fleet: Fleet | None = None
        for node in nodes:
            self.put(node.name, node)

    def put(self, name: str, node: NodeView | None) -> None:
        """A node as it is now; None where it is gone."""
        former = self._nodes.pop(name, None)
        if former is not None:
            static = self._statics.pop(name)
            self._sorts[static].remove(former)
            if not self._sorts[static].kinds:
                del self._sorts[static]
        if node is not None and node.schedulable:
            static = static_of(node, self.labels)
            self._nodes[name], self._statics[name] = node, static
            self._sorts.setdefault(static, _Sort()).add(node)
        self._fleet = None

    def fleet(self) -> Fleet:
        """As `fleet_of` would say of all the nodes."""
        if self._fleet is None:
            self._fleet = tuple(
                Kind(self._nodes[next(iter(names))], tuple(names), static)
                for static, sort in self._sorts.items()
                for names in sort.kinds.values()
            )
        return self._fleet

    def best(self, demand: PodDemand, count: int) -> list[NodeView]:
        """Nodes on which such a pod would most likely find room: those with most devices, then most memory, left."""
        device = demand.device_resource or ANY
        found: list[Rank] = []
        for sort in self._sorts.values():
            node = self._nodes[next(iter(next(iter(sort.kinds.values()))))]
            if device in sort.ranks and selects(demand, node) and tolerates(demand, node.taints):
                found += sort.ranks[device][-count:]
        return [self._nodes[name] for _, _, name in heapq.nlargest(count, found)]


class _Sort:
    """Nodes that differ only in what runs on them."""

    def __init__(self) -> None:
        self.kinds: dict[frozenset[tuple[str, int]], dict[str, None]] = {}  # used -> names, oldest first
        self.ranks: dict[str, list[Rank]] = {}  # device -> nodes, the fullest first

    def add(self, node: NodeView) -> None:
        self.kinds.setdefault(frozenset(node.used.items()), {})[node.name] = None
        for device in _devices(node):
            bisect.insort(self.ranks.setdefault(device, []), _rank(node, device))

    def remove(self, node: NodeView) -> None:
        used = frozenset(node.used.items())
        del self.kinds[used][node.name]
        if not self.kinds[used]:
            del self.kinds[used]
        for device in _devices(node):
            ranked = self.ranks[device]
            del ranked[bisect.bisect_left(ranked, _rank(node, device))]


def _devices(node: NodeView) -> tuple[str, ...]:
    """Extended resources have a domain."""
    return (ANY, *(name for name in node.allocatable if "/" in name))


def _rank(node: NodeView, device: str) -> Rank:
    return left(node, device), left(node, "memory"), node.name


def left(node: NodeView, resource: str) -> int:
    return node.allocatable.get(resource, 0) - node.used.get(resource, 0)
