"""What nodes offer through DRA: devices of ResourceSlices that a pod gets by asking for an extended resource. Pure.

A DeviceClass gives its devices such a name, `extendedResourceName` or else deviceclass.resource.kubernetes.io/NAME, and the
scheduler then serves plain requests from them (KEP-5004). Its selectors are CEL. Understood are equalities of the driver and
of attributes, joined by `&&`, as the makers' own classes have them; a class that says more offers nothing here, since
a device that no pod would get must not be counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omni_operator.placement.types import NodeView
from omni_runtime.deploy.quantity import parse_quantity

IMPLICIT = "deviceclass.resource.kubernetes.io/"
DRIVER = "driver"  # no attribute has this name without a domain
_QUOTED = r"""(?:'([^'"\\]*)'|"([^'"\\]*)")"""
_DRIVER = re.compile(rf"device\.driver\s*==\s*{_QUOTED}")
_ATTRIBUTE = re.compile(
    rf"device\.attributes\[\s*{_QUOTED}\s*\]\.([A-Za-z_][A-Za-z0-9_]*)\s*==\s*(?:{_QUOTED}|(true|false))"
)

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Device:
    """facts: its driver and its attributes, DOMAIN/NAME. memory: bytes, None where the driver does not say it."""

    facts: frozenset[tuple[str, str]]
    memory: int | None


@dataclass(frozen=True, slots=True)
class Slice:
    """The devices of one pool on one node, or a part of them."""

    pool: tuple[str, str]  # driver, name
    generation: int
    node: str
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """needs: what a device has to say of itself."""

    name: str
    resource: str
    created: str
    needs: frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Offer:
    """Of one node. memories: bytes of the smallest device of a resource."""

    counts: Mapping[str, int] = field(default_factory=dict)
    memories: Mapping[str, int] = field(default_factory=dict)


def read_slice(body: Json) -> Slice | None:
    """None: its devices are no single node's, such as those of a network."""
    spec = body.get("spec") or {}
    pool, node, driver = spec.get("pool") or {}, spec.get("nodeName"), str(spec.get("driver"))
    if not node:
        return None
    devices = tuple(_device(driver, d) for d in spec.get("devices") or [] if not _kept_away(d))
    return Slice((driver, str(pool.get("name"))), int(pool.get("generation") or 0), str(node), devices)


def read_class(body: Json) -> DeviceClass | None:
    """None: its selectors say what is not understood."""
    meta, spec = body.get("metadata") or {}, body.get("spec") or {}
    name, needs = str(meta.get("name")), set[tuple[str, str]]()
    for selector in spec.get("selectors") or []:
        found = _conditions(str((selector.get("cel") or {}).get("expression") or ""))
        if found is None:
            return None
        needs |= found
    resource = str(spec.get("extendedResourceName") or f"{IMPLICIT}{name}")
    return DeviceClass(name, resource, str(meta.get("creationTimestamp") or ""), frozenset(needs))


def classes_by_resource(classes: Iterable[DeviceClass]) -> dict[str, DeviceClass]:
    """Of several with one resource the scheduler takes the youngest, then the first by name."""
    ordered = sorted(sorted(classes, key=lambda c: c.name, reverse=True), key=lambda c: c.created)
    return {c.resource: c for c in ordered}


def offers(slices: Iterable[Slice], classes: Mapping[str, DeviceClass]) -> dict[str, Offer]:
    """Node -> what it offers. Only the newest generation of each pool counts."""
    listed = list(slices)
    newest: dict[tuple[str, str], int] = {}
    for part in listed:
        newest[part.pool] = max(newest.get(part.pool, 0), part.generation)
    found: dict[str, list[Device]] = {}
    for part in listed:
        if part.generation == newest[part.pool]:
            found.setdefault(part.node, []).extend(part.devices)
    return {node: _offer(devices, classes) for node, devices in found.items()}


def with_offer(node: NodeView, offer: Offer) -> NodeView:
    """A resource that the node's device plugin has already is served from there, and from nowhere else."""
    added = {name: count for name, count in offer.counts.items() if not node.allocatable.get(name)}
    return replace(node, allocatable={**node.allocatable, **added}, memories=dict(offer.memories))


def _offer(devices: Iterable[Device], classes: Mapping[str, DeviceClass]) -> Offer:
    counts: dict[str, int] = {}
    memories: dict[str, int] = {}
    for device in devices:
        for resource, chosen in classes.items():
            if chosen.needs <= device.facts:
                counts[resource] = counts.get(resource, 0) + 1
                if device.memory is not None:
                    memories[resource] = min(memories.get(resource, device.memory), device.memory)
    return Offer(counts, memories)


def _device(driver: str, device: Json) -> Device:
    facts = {(DRIVER, driver)}
    for name, value in (device.get("attributes") or {}).items():
        stated = next(iter(value.values()), None) if isinstance(value, Mapping) else value
        text = str(stated).lower() if isinstance(stated, bool) else str(stated)
        facts.add((name if "/" in name else f"{driver}/{name}", text))
    return Device(frozenset(facts), _memory(device.get("capacity") or {}))


def _kept_away(device: Json) -> bool:
    """Tainted by its driver or by an administrator; our pods tolerate no taint of a device."""
    return any(t.get("effect") in ("NoSchedule", "NoExecute") for t in device.get("taints") or [])


def _conditions(expression: str) -> set[tuple[str, str]] | None:
    """None: something else than equalities."""
    found = set()
    for part in expression.split("&&"):
        text = part.strip()
        if match := _DRIVER.fullmatch(text):
            found.add((DRIVER, match[1] or match[2] or ""))
        elif match := _ATTRIBUTE.fullmatch(text):
            domain, value = match[1] or match[2] or "", match[4] or match[5] or match[6] or ""
            found.add((f"{domain}/{match[3]}", value))
        else:
            return None
    return found


def _memory(capacity: Json) -> int | None:
    for name, value in capacity.items():
        if name.rpartition("/")[2] in ("memory", "vram"):
            try:
                return int(parse_quantity(str(value.get("value") if isinstance(value, Mapping) else value)))
            except ValueError:
                return None
    return None
