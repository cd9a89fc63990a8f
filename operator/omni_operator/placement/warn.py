"""What is legal but unwise. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from omni_operator.placement.demand import PodDemand, selects, tolerates
from omni_operator.placement.inventory import device_memory
from omni_operator.placement.memory import concurrent_requests
from omni_operator.placement.nodes import Shelf
from omni_operator.placement.packing import surely_too_much
from omni_operator.placement.question import Question
from omni_operator.placement.types import MEMORY, PlacementWarning, StageMemory, Witness

GIB = 1 << 30
OLD_SECONDS = 60.0
# Requests are rarely of full length: a cache for a quarter of them is usual, one for less makes them wait.
SMALL_CACHE = 0.25


def memory_warnings(question: Question, memory: tuple[StageMemory, ...]) -> Iterator[PlacementWarning]:
    stages = {s.name: s for s in question.plan.stages}
    for one in memory:
        stage, path = stages[one.stage], question.path(one.stage)
        if not one.known:
            message = (
                f"what stage {one.stage} loads is not known, so its memory was not checked; "
                "accelerator.memory may say what it takes of each device"
            )
            yield PlacementWarning("WeightsUnknown", message, path)
            continue
        at_once = concurrent_requests(one)
        if at_once is not None and one.missing == 0 and at_once < SMALL_CACHE * stage.max_concurrency:
            message = (
                f"the KV cache holds {at_once:.1f} requests of full length, maxConcurrency is {stage.max_concurrency}: "
                "longer requests will wait for each other"
            )
            yield PlacementWarning("KvCacheSmall", message, f"{path}.maxConcurrency")


def placement_warnings(
    question: Question, shelf: Shelf, witness: Witness, ties: Mapping[str, int]
) -> Iterator[PlacementWarning]:
    yield from _old_facts(question)
    yield from _wrong_nodes(question, shelf.demands)
    yield from _apart(question, witness, ties)
    yield from _overcommitted(question, shelf.demands, witness)
    yield from _no_room_to_grow(question, shelf)


def _old_facts(question: Question) -> Iterator[PlacementWarning]:
    age = question.cluster.age_seconds
    if age > OLD_SECONDS:
        yield PlacementWarning("FactsOld", f"nodes and quota were last seen {age:.0f} s ago")


def _wrong_nodes(question: Question, demands: tuple[PodDemand, ...]) -> Iterator[PlacementWarning]:
    """The scheduler counts devices, not their memory: a selector that is too wide sends pods where they cannot run."""
    for demand in demands:
        if demand.device_resource is None or not demand.device_bytes:
            continue
        small: dict[str, int] = {}
        known: dict[object, int | None] = {}
        for node, names, static in question.fleet or ():
            if static not in known:
                fits = selects(demand, node) and tolerates(demand, node.taints)
                known[static] = device_memory(node, demand.device_resource) if fits else None
            memory = known[static]
            if memory is not None and memory < demand.device_bytes and node.allocatable.get(demand.device_resource):
                small |= dict.fromkeys(names, memory)
        if small:
            name, memory = min(small.items())
            message = (
                f"{len(small)} nodes match the selector of {demand.device_class}, but their devices are too small "
                f"({name}: {memory / GIB:.0f} GiB, needed {demand.device_bytes / GIB:.1f} GiB); pods may land there. "
                "Give the device class a nodeSelector"
            )
            yield PlacementWarning("SelectorTooWide", message, question.path(demand.group))


def _overcommitted(question: Question, demands: tuple[PodDemand, ...], witness: Witness) -> Iterator[PlacementWarning]:
    """Limits hold the arenas in /dev/shm, requests do not: a node may have room for the one and not for the other."""
    limits = {d.group: d.limits.get(MEMORY, 0) for d in demands}
    mine: dict[str, int] = {}
    for placement in witness.placements:
        mine[placement.node] = mine.get(placement.node, 0) + limits[placement.group]
    nodes = {name: node for node, names, _ in question.fleet or () for name in names if name in mine}
    over = {
        name: mine[name] + node.used.get(MEMORY, 0) - node.allocatable.get(MEMORY, 0) for name, node in nodes.items()
    }
    name, excess = max(over.items(), key=lambda item: (item[1], item[0]), default=("", 0))
    if excess > 0:
        message = (
            f"if all pods on node {name} use what their limits allow, {excess / GIB:.1f} GiB of its memory are missing "
            "(arenas in /dev/shm count): pods would be evicted"
        )
        yield PlacementWarning("MemoryOvercommitted", message, "spec.stages")


def _apart(question: Question, witness: Witness, ties: Mapping[str, int]) -> Iterator[PlacementWarning]:
    label = question.cluster.domain_label
    if label is None or not ties:
        return
    domain = {name: node.labels.get(label, name) for node, names, _ in question.fleet or () for name in names}
    for number in sorted(set(ties.values())):
        groups = sorted(g for g, n in ties.items() if n == number)
        used = sorted({domain[p.node] for p in witness.placements if p.group in groups})
        if len(used) > 1:
            message = f"{' and '.join(groups)} exchange hidden rows across {label}: {', '.join(used)}"
            yield PlacementWarning("HotEdgeAcrossDomains", message, "spec.edges")


def _no_room_to_grow(question: Question, shelf: Shelf) -> Iterator[PlacementWarning]:
    """The upper bounds of the autoscaler, all reached at once, would surely not fit."""
    if question.cluster.nodes_may_be_added:
        return
    bounds = question.plan.replicas
    grown = {
        d.group: bounds[d.group].maximum or 0
        for d in shelf.demands
        if d.group in bounds and (bounds[d.group].maximum or 0) > d.replicas
    }
    items = [replace(i, count=grown.get(i.name, i.count)) for i in shelf.items]
    if grown and surely_too_much(items, shelf.classes):
        wanted = ", ".join(f"{group} {count}" for group, count in grown.items())
        message = f"the nodes have no room for maxReplicas of all stages at once ({wanted})"
        yield PlacementWarning("MaxReplicasDoNotFit", message, "spec.stages")
