"""Nodes by kind: a thousand nodes are a handful of kinds once labels that nobody asks for are left out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from omni_operator.placement.inventory import tells_devices
from omni_operator.placement.types import NodeView


class Kind(NamedTuple):
    """Nodes that take pods and are equal in all that can make a difference; `node` is one of them."""

    node: NodeView
    names: tuple[str, ...]
    static: object  # equal for nodes that differ only in what runs on them


Fleet = tuple[Kind, ...]


def fleet_of(nodes: Iterable[NodeView], labels: frozenset[str]) -> Fleet:
    """labels: those that a selector names; labels that describe devices are kept as well."""
    found: dict[tuple[object, object], tuple[NodeView, list[str], object]] = {}
    for node in nodes:
        if not node.schedulable:
            continue
        static = static_of(node, labels)
        key = (static, frozenset(node.used.items()))
        entry = found.get(key)
        if entry is None:
            found[key] = (node, [node.name], static)
        else:
            entry[1].append(node.name)
    return tuple(Kind(node, tuple(names), static) for node, names, static in found.values())


def static_of(node: NodeView, labels: frozenset[str]) -> object:
    """What of a node stays as it is while pods come and go, as far as it can make a difference."""
    kept = frozenset((k, v) for k, v in node.labels.items() if k in labels or _tells(k))
    return kept, node.taints, frozenset(node.allocatable.items()), frozenset(node.memories.items())


_tells = lru_cache(maxsize=4096)(tells_devices)
