"""Checks a placement without the solver: straight from pods, nodes and the words of Kubernetes. Pure.

Shares no code with packing.py and nodes.py on purpose: a mistake there must not hide here.
"""

from __future__ import annotations

from collections import Counter

from omni_operator.placement.demand import PodDemand
from omni_operator.placement.types import ClusterView, Witness


def verify_witness(witness: Witness, demands: tuple[PodDemand, ...], cluster: ClusterView) -> tuple[str, ...]:
    """What is wrong with the placement, in words; nothing for a right one."""
    wrong: list[str] = []
    nodes = {n.name: n for n in (*(cluster.nodes or ()), *witness.added_nodes)}
    by_group = {d.group: d for d in demands}
    placed = Counter(p.group for p in witness.placements)
    wrong += [
        f"{d.group}: {placed.get(d.group, 0)} of {d.replicas} replicas have a node"
        for d in demands
        if placed.get(d.group, 0) != d.replicas
    ]
    if len({(p.group, p.replica) for p in witness.placements}) != len(witness.placements):
        wrong.append("a replica has two nodes")
    load: dict[str, Counter[str]] = {}
    for placement in witness.placements:
        node, asks = nodes.get(placement.node), by_group.get(placement.group)
        if node is None or asks is None:
            wrong.append(f"{placement} names a node or a group that is not there")
            continue
        if not node.schedulable:
            wrong.append(f"{placement.node} takes no pods")
        for label, value in asks.node_selector.items():
            if node.labels.get(label) != value:
                wrong.append(f"{placement.group} on {placement.node}: label {label} is not {value}")
        for taint in node.taints:
            if taint.effect == "PreferNoSchedule":
                continue
            matching = [
                t for t in asks.tolerations
                if t.get("effect", taint.effect) in ("", taint.effect)
                and (
                    (t.get("operator") == "Exists" and t.get("key", taint.key) in ("", taint.key))
                    or (t.get("key") == taint.key and t.get("operator", "Equal") == "Equal" and t.get("value", "") == taint.value)
                )
            ]  # fmt: skip
            if not matching:
                wrong.append(f"{placement.group} on {placement.node}: taint {taint.key} is not tolerated")
        load.setdefault(placement.node, Counter()).update(asks.requests)
    for name, asked in load.items():
        for resource, amount in asked.items():
            left = max(0, nodes[name].allocatable.get(resource, 0) - nodes[name].used.get(resource, 0))
            if amount > left:
                wrong.append(f"{name}: {amount} of {resource} placed, {left} left")
    return tuple(wrong)
