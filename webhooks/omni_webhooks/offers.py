"""What each node offers through DRA, kept up slice by slice: a slice that changes is looked at with its pool alone. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from omni_operator.placement.dra import DeviceClass, Offer, Slice, classes_by_resource, offers
from omni_webhooks.cache import Key

T = TypeVar("T")
NOTHING = Offer()


class Offers:
    """Each change answers with the nodes that offer something else than before."""

    def __init__(self) -> None:
        self._slices: dict[Key, Slice] = {}
        self._pools: dict[tuple[str, str], set[Key]] = {}
        self._nodes: dict[str, set[Key]] = {}
        self._classes: dict[Key, DeviceClass] = {}
        self._offers: dict[str, Offer] = {}

    def of(self, node: str) -> Offer:
        return self._offers.get(node, NOTHING)

    def slice_changed(self, key: Key, value: Slice | None) -> set[str]:
        former = self._slices.pop(key, None)
        if former is not None:
            _discard(self._pools, former.pool, key)
            _discard(self._nodes, former.node, key)
        if value is not None:
            self._slices[key] = value
            self._pools.setdefault(value.pool, set()).add(key)
            self._nodes.setdefault(value.node, set()).add(key)
        # A new generation makes the slices of an older one void, which may be on other nodes.
        touched = [s for s in (former, value) if s is not None]
        pools = (self._slices[k].node for s in touched for k in self._pools.get(s.pool, ()))
        return self._refresh({*(s.node for s in touched), *pools})

    def class_changed(self, key: Key, value: DeviceClass | None) -> set[str]:
        if self._classes.get(key) == value:
            return set()
        self._classes.pop(key, None)
        if value is not None:
            self._classes[key] = value
        return self._refresh(set(self._nodes))

    def _refresh(self, nodes: Iterable[str]) -> set[str]:
        chosen = set(nodes)
        pools = {self._slices[key].pool for node in chosen for key in self._nodes.get(node, ())}
        parts = (self._slices[key] for pool in pools for key in self._pools[pool])
        found = offers(parts, classes_by_resource(self._classes.values())) if self._classes else {}
        changed = {node for node in chosen if found.get(node, NOTHING) != self.of(node)}
        for node in changed:
            if found.get(node, NOTHING) == NOTHING:
                del self._offers[node]
            else:
                self._offers[node] = found[node]
        return changed


def _discard(keys: dict[T, set[Key]], name: T, key: Key) -> None:
    keys[name].discard(key)
    if not keys[name]:
        del keys[name]
