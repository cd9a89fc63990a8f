"""From nodes to numbers: which kinds of nodes there are, who may use them, and why a pod finds none. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omni_operator.placement.demand import PodDemand, human, selects, tolerates
from omni_operator.placement.fleet import Fleet
from omni_operator.placement.inventory import device_memory
from omni_operator.placement.packing import BinClass, Item, Packing, pack, room
from omni_operator.placement.types import (
    Constraint,
    ConstraintKind,
    NodeView,
    Placement,
    Resources,
    Witness,
)


@dataclass(frozen=True, slots=True)
class Shelf:
    """The cluster as the packer sees it. `names[i]` is the node of bin member i."""

    demands: tuple[PodDemand, ...]
    dimensions: tuple[str, ...]
    classes: tuple[BinClass, ...]
    items: tuple[Item, ...]
    names: tuple[str, ...]


def arrange(
    demands: Sequence[PodDemand],
    fleet: Fleet,
    domain_label: str | None = None,
    ties: Mapping[str, int] | None = None,
    *,
    empty: bool = False,
) -> Shelf:
    """ties: group -> number of the component that has to stay in one domain. empty: as if nothing ran on the nodes."""
    dimensions = tuple(sorted({name for d in demands for name in d.requests}))
    found: dict[tuple[tuple[int, ...], str, tuple[bool, ...]], list[str]] = {}
    known: dict[object, tuple[bool, ...]] = {}  # most nodes differ only in what runs on them
    for node, names, static in fleet:
        have, used = node.allocatable, {} if empty else node.used
        size = tuple(max(0, have.get(name, 0) - used.get(name, 0)) for name in dimensions)
        may = known.get(static)
        if may is None:
            may = known[static] = tuple(accepts(d, node) for d in demands)
        if domain_label and domain_label not in node.labels:
            for name in names:  # without the label each node is a domain of its own
                found.setdefault((size, name, may), []).append(name)
        else:
            domain = node.labels[domain_label] if domain_label else ""
            found.setdefault((size, domain, may), []).extend(names)
    numbers = itertools.count()
    names = tuple(name for members in found.values() for name in members)
    classes = tuple(
        BinClass(size, tuple(next(numbers) for _ in members), domain) for (size, domain, _), members in found.items()
    )
    allowed = [frozenset(c for c, (_, _, may) in enumerate(found) if may[g]) for g in range(len(demands))]
    items = tuple(
        Item(
            d.group,
            d.replicas,
            tuple(d.requests.get(name, 0) for name in dimensions),
            allowed[g],
            (ties or {}).get(d.group),
        )
        for g, d in enumerate(demands)
    )
    return Shelf(tuple(demands), dimensions, classes, items, names)


def accepts(demand: PodDemand, node: NodeView) -> bool:
    """Labels, taints, and devices with the memory that the pod's stages need (the scheduler does not look at that)."""
    if not selects(demand, node) or not tolerates(demand, node.taints):
        return False
    if demand.device_resource is None or not node.allocatable.get(demand.device_resource):
        return True
    memory = device_memory(node, demand.device_resource)
    return memory is None or memory >= demand.device_bytes


def place(shelf: Shelf) -> tuple[Witness | None, Packing]:
    packing = pack(shelf.items, shelf.classes)
    if packing.placed is None:
        return None, packing
    placements = tuple(Placement(group, replica, shelf.names[member]) for group, replica, member in packing.placed)
    return Witness(tuple(sorted(placements, key=lambda p: (p.group, p.replica)))), packing


def explain(shelf: Shelf, fleet: Fleet, packing: Packing) -> Constraint:
    """Why there is no place, by the first of these that is true: no node, too small, too few, too scattered."""
    for demand, item in zip(shelf.demands, shelf.items, strict=True):
        if demand.replicas and not item.allowed:
            return _no_node(demand, fleet)
    emptied = arrange(shelf.demands, fleet, empty=True)
    for demand, item in zip(shelf.demands, emptied.items, strict=True):
        if demand.replicas and not room(item, emptied.classes):
            return _too_small(demand, item, emptied)
    for demand, item in zip(shelf.demands, shelf.items, strict=True):
        if room(item, shelf.classes) < demand.replicas:
            return _too_few(demand, item, shelf)
    return _together(shelf) or _scattered(shelf, packing)


def _no_node(demand: PodDemand, fleet: Fleet) -> Constraint:
    nodes = [kind.node for kind in fleet for _ in kind.names]
    labels = ", ".join(f"{k}={v}" for k, v in demand.node_selector.items())
    selected = [n for n in nodes if selects(demand, n)]
    if not nodes:
        why = "the cluster has no node that takes pods"
    elif not selected:
        why = f"none of the {len(nodes)} nodes is labelled {labels}"
    elif not any(tolerates(demand, n.taints) for n in selected):
        taints = sorted({f"{t.key}={t.value}:{t.effect}" for n in selected for t in n.taints})
        why = f"the {len(selected)} nodes with the right labels have taints that the pods do not tolerate: {', '.join(taints)}"
    else:
        small = max(device_memory(n, demand.device_resource or "") or 0 for n in selected)
        why = (
            f"the devices of the nodes with the right labels have {small / 2**30:.0f} GiB, and the stages need "
            f"{demand.device_bytes / 2**30:.1f} GiB"
        )
    return Constraint(ConstraintKind.NO_NODE, f"{demand.group}: {why}", _stages(demand), demand.device_resource)


def _too_small(demand: PodDemand, item: Item, shelf: Shelf) -> Constraint:
    """Even on an empty node one replica does not fit: names the amount that is nearest to fitting nowhere."""
    largest = {name: max(shelf.classes[c].free[k] for c in item.allowed) for k, name in enumerate(shelf.dimensions)}
    short = [n for k, n in enumerate(shelf.dimensions) if item.size[k] > largest[n]]
    # Without a single short amount no one node has all of them at once.
    names = short or [n for k, n in enumerate(shelf.dimensions) if item.size[k]]
    resource = demand.device_resource if demand.device_resource in names else names[0]
    parts = ", ".join(
        f"{human(n, item.size[shelf.dimensions.index(n)])} (largest: {_plain(n, largest[n])})" for n in names
    )
    joined = "one node that has all of it: " if not short else ""
    hint = "; a replica does not span nodes" if resource and resource == demand.device_resource else ""
    message = f"{demand.group}: one replica needs {joined}{parts}, more than any fitting node{hint}"
    return Constraint(ConstraintKind.NODE_TOO_SMALL, message, _stages(demand), resource)


def _too_few(demand: PodDemand, item: Item, shelf: Shelf) -> Constraint:
    fits = room(item, shelf.classes)
    resource = _binding(item, shelf)
    message = (
        f"{demand.group}: {demand.replicas} replicas of {_request(demand, resource)} each, "
        f"the fitting nodes have room for {fits}"
    )
    return Constraint(ConstraintKind.CAPACITY, message, _stages(demand), resource)


def _binding(item: Item, shelf: Shelf) -> str:
    """The amount whose absence would make most room."""
    best, gain = shelf.dimensions[0], -1
    for k, name in enumerate(shelf.dimensions):
        if not item.size[k]:
            continue
        size = tuple(0 if i == k else s for i, s in enumerate(item.size))
        fits = room(Item(item.name, item.count, size, item.allowed), shelf.classes) if any(size) else 1 << 30
        if fits > gain:
            best, gain = name, fits
    return best


def _together(shelf: Shelf) -> Constraint | None:
    """Groups that fit alone, but whose sum is more than the nodes have that they may use."""
    for allowed in {i.allowed for i in shelf.items if i.count}:
        inside = [i for i in shelf.items if i.count and i.allowed <= allowed]
        for k, name in enumerate(shelf.dimensions):
            need = sum(i.size[k] * i.count for i in inside)
            have = sum(shelf.classes[c].free[k] * len(shelf.classes[c].members) for c in allowed)
            if need > have:
                users = sorted((i for i in inside if i.size[k]), key=lambda i: -i.size[k] * i.count)
                parts = " + ".join(f"{i.name} {i.count} x {_plain(name, i.size[k])}" for i in users)
                message = f"{parts} = {human(name, need)}, the fitting nodes have {_plain(name, have)} left"
                return Constraint(ConstraintKind.CAPACITY, message, tuple(i.name for i in users), name)
    return None


def _scattered(shelf: Shelf, packing: Packing) -> Constraint:
    users = sorted((d for d in shelf.demands if d.replicas), key=lambda d: -max(d.requests.values(), default=0))
    devices = [d for d in users if d.device_resource]
    chosen = devices or users
    parts = ", ".join(f"{d.group} {d.replicas} x ({_request(d, d.device_resource)})" for d in chosen)
    certain = "" if packing.proven else f" (searched {packing.states} states without a proof)"
    message = f"enough is left in sum, but not on single nodes: {parts}{certain}"
    return Constraint(ConstraintKind.FRAGMENTATION, message, tuple(d.group for d in chosen))


def _request(demand: PodDemand, resource: str | None) -> str:
    chosen = resource if resource is not None and resource in demand.requests else next(iter(demand.requests))
    return human(chosen, demand.requests[chosen])


def _plain(resource: str, amount: int) -> str:
    return human(resource, amount).removesuffix(f" x {resource}").removesuffix(f" of {resource}")


def _stages(demand: PodDemand) -> tuple[str, ...]:
    return demand.stages or (demand.group,)


def total(demands: Sequence[PodDemand], kind: str = "requests") -> Resources:
    """Sum over all pods."""
    found: dict[str, int] = {}
    for demand in demands:
        for name, amount in getattr(demand, kind).items():
            found[name] = found.get(name, 0) + amount * demand.replicas
    return found
