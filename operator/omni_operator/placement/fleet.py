"""Nodes by kind: a thousand nodes are a handful of kinds once labels that nobody asks for are left out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from omni_operator.placement.inventory import tells_devices
from omni_operator.placement.types import NodeView


class Kind(NamedTuple):
    """Equal nodes that take pods. `node` stands for all of them; its labels are those that can make a difference."""

    node: NodeView
    names: tuple[str, ...]


Fleet = tuple[Kind, ...]


def fleet_of(nodes: Iterable[NodeView], labels: frozenset[str]) -> Fleet:
    """labels: those that a selector names; labels that describe devices are kept as well."""
    found: dict[tuple[object, ...], tuple[NodeView, dict[str, str], list[str]]] = {}
    for node in nodes:
        if not node.schedulable:
            continue
        kept = {k: v for k, v in node.labels.items() if k in labels or tells_devices(k)}
        key = (
            frozenset(kept.items()),
            node.taints,
            frozenset(node.allocatable.items()),
            frozenset(node.used.items()),
        )
        entry = found.get(key)
        if entry is None:
            found[key] = (node, kept, [node.name])
        else:
            entry[2].append(node.name)
    return tuple(Kind(replace(node, labels=kept), tuple(names)) for node, kept, names in found.values())
