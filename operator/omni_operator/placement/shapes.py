"""Nodes that would help: of a kind that the cluster has, that its autoscaler knows, or made up for the pod. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from omni_operator.placement.changes import Change
from omni_operator.placement.demand import PodDemand
from omni_operator.placement.nodes import accepts
from omni_operator.placement.question import Question
from omni_operator.placement.types import CPU, MEMORY, PODS, NodeView

GIB = 1 << 30
ADDED_PREFIX = "added-"


def node_shapes(question: Question, demand: PodDemand) -> Iterator[tuple[str, NodeView]]:
    """(what a person calls it, an empty node of it) on which one pod of the demand fits, known kinds first."""
    seen: set[frozenset[tuple[str, int]]] = set()
    known = [k.node for k in question.fleet or ()] + list(question.cluster.node_shapes)
    for node in known:
        key = frozenset(node.allocatable.items())
        if key in seen or not accepts(demand, node) or not _holds(demand, node):
            continue
        seen.add(key)
        yield f"a node like {node.name}", replace(node, used={})
    yield _described(demand), _made_up(question, demand)


def add_nodes(question: Question, demand: PodDemand, shape: tuple[str, NodeView], count: int) -> Change:
    what, node = shape
    taken = len([n for n in question.cluster.nodes or () if n.name.startswith(ADDED_PREFIX)])
    added = tuple(replace(node, name=f"{ADDED_PREFIX}{taken + i + 1}") for i in range(count))
    text = f"add {what}" if count == 1 else f"add {count} nodes: each {what}"
    return Change(text, question.with_nodes(added), stage=demand.group)


def _holds(demand: PodDemand, node: NodeView) -> bool:
    return all(amount <= node.allocatable.get(name, 0) for name, amount in demand.requests.items())


def _made_up(question: Question, demand: PodDemand) -> NodeView:
    """As many devices as the usual machine of the class has, and CPU and memory for what runs on them."""
    resource = demand.device_resource
    device = next((d for d in question.catalogue.classes.values() if d.name == demand.device_class), None)
    count = demand.requests.get(resource, 0) if resource else 0
    devices = max(count, device.per_node if device else 1) if resource else 0
    pods = max(1, devices // count) if count else 4
    allocatable = {name: amount * pods for name, amount in demand.requests.items()}
    allocatable[CPU] = math.ceil(allocatable.get(CPU, 0) / 1000) * 1000
    allocatable[MEMORY] = math.ceil(allocatable.get(MEMORY, 0) / GIB) * GIB
    allocatable[PODS] = 110
    if resource:
        allocatable[resource] = devices
    return NodeView("made-up", dict(demand.node_selector), (), allocatable)


def _described(demand: PodDemand) -> str:
    parts = [f"{n} x {r}" for r, n in demand.requests.items() if "/" in r]
    parts.append(f"{demand.requests.get(CPU, 0) / 1000:g} CPUs and {demand.requests.get(MEMORY, 0) / GIB:.0f} GiB free")
    labels = ", ".join(f"{k}={v}" for k, v in sorted(demand.node_selector.items()))
    return f"a node with {', '.join(parts)}" + (f", labelled {labels}" if labels else "")
