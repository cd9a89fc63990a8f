"""Nodes, what their pods use of them, and quotas: kept up event by event, so that a review only looks. No I/O.

Of a pod its requests are kept and nothing else; a cluster has many, and most are not ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omni_operator.names import PIPELINE_LABEL, pipeline_label
from omni_operator.placement import ClusterView, NodeView, QuotaView, pod_resources
from omni_operator.placement.demand import PodDemand
from omni_operator.placement.dra import DeviceClass, Slice, with_offer
from omni_operator.placement.views import holds_resources
from omni_webhooks.cache import Key
from omni_webhooks.index import NodeIndex
from omni_webhooks.offers import NOTHING, Offers

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PodUse:
    """What a pod holds on its node. pipeline: the label of one of ours, else ""."""

    node: str
    namespace: str
    pipeline: str
    requests: Mapping[str, int]
    limits: Mapping[str, int] | None  # only of our own pods: for quotas that count them already


def read_pod(pod: Json) -> PodUse | None:
    """None: holds nothing (ended, or not on a node), or not for long.

    A pod that is being deleted still keeps its devices from the scheduler, but a pipeline that is applied while its
    predecessor drains will find them: refusing it would be wrong a minute later.
    """
    node, metadata = (pod.get("spec") or {}).get("nodeName"), pod.get("metadata") or {}
    if not node or not holds_resources(pod) or metadata.get("deletionTimestamp"):
        return None
    pipeline = str((metadata.get("labels") or {}).get(PIPELINE_LABEL) or "")
    limits = pod_resources(pod["spec"], "limits") if pipeline else None
    namespace = str(metadata.get("namespace") or "")
    return PodUse(str(node), namespace, pipeline, pod_resources(pod["spec"]), limits)


class Nodes:
    """The nodes with what is used of them."""

    def __init__(self) -> None:
        self._told: dict[str, NodeView] = {}  # as the node tells of itself
        self._offers = Offers()
        self._plain: dict[str, NodeView] = {}  # with what it offers through DRA
        self._loads: dict[str, dict[str, int]] = {}
        self._pods: dict[Key, PodUse] = {}
        self._ours: dict[tuple[str, str], set[Key]] = {}  # (namespace, pipeline label) -> its pods
        self._loaded: dict[str, NodeView] = {}  # plain, with its load; rebuilt when either changes
        self._index = NodeIndex()

    # ------------------------------------------------------------------ events
    def node_changed(self, key: Key, node: NodeView | None) -> None:
        if node is None:
            self._told.pop(key[1], None)
            self._plain.pop(key[1], None)
            self._loaded.pop(key[1], None)
            self._index.put(key[1], None)
        elif self._told.get(key[1]) != node:  # most of what a node says of itself is a heartbeat
            self._told[key[1]] = node
            self._offer([key[1]])

    def slice_changed(self, key: Key, value: Slice | None) -> None:
        self._offer(self._offers.slice_changed(key, value))

    def class_changed(self, key: Key, value: DeviceClass | None) -> None:
        self._offer(self._offers.class_changed(key, value))

    def _offer(self, names: Iterable[str]) -> None:
        for name in names:
            node, offer = self._told.get(name), self._offers.of(name)
            if node is not None:  # slices may come before their node
                self._plain[name] = node if offer == NOTHING else with_offer(node, offer)
                self._refresh(name)

    def pod_changed(self, key: Key, pod: PodUse | None) -> None:
        former = self._pods.get(key)
        if former == pod:
            return
        if former is not None:
            del self._pods[key]
            self._add(former, -1)
            if former.pipeline:
                owner = (former.namespace, former.pipeline)
                self._ours[owner].discard(key)
                if not self._ours[owner]:
                    del self._ours[owner]
        if pod is not None:
            self._pods[key] = pod
            self._add(pod, 1)
            if pod.pipeline:
                self._ours.setdefault((pod.namespace, pod.pipeline), set()).add(key)
        for name in {p.node for p in (former, pod) if p is not None}:
            self._refresh(name)

    def _add(self, pod: PodUse, sign: int) -> None:
        load = self._loads.setdefault(pod.node, {})
        for name, amount in pod.requests.items():
            load[name] = load.get(name, 0) + sign * amount
            if not load[name]:
                del load[name]  # what holds nothing is equal to what never did
        if not load:
            del self._loads[pod.node]

    def _refresh(self, name: str) -> None:
        plain = self._plain.get(name)
        if plain is not None:
            self._loaded[name] = replace(plain, used=dict(self._loads.get(name, {})))
            self._index.put(name, self._loaded[name])

    # ------------------------------------------------------------------ questions
    def tell_apart_by(self, labels: frozenset[str]) -> None:
        """Which labels of nodes matter; they change with the profiles."""
        if self._index.labels != labels:
            self._index = NodeIndex(labels, self._loaded.values())

    def index(self, pipeline: Key) -> NodeIndex | None:
        """The nodes of `view`, ordered; None where pods of the pipeline itself are left out of that."""
        return None if self._ours.get((pipeline[0], pipeline_label(pipeline[1]))) else self._index

    def view(
        self,
        pipeline: Key,
        quotas: Iterable[QuotaView],
        *,
        domain_label: str | None,
        age_seconds: float,
    ) -> ClusterView:
        """The cluster for one pipeline, without its own pods: an edit is not refused for the room that they take."""
        own = [self._pods[key] for key in self._ours.get((pipeline[0], pipeline_label(pipeline[1])), ())]
        nodes = {**self._loaded, **self._without(own)} if own else self._loaded
        return ClusterView(
            nodes=tuple(nodes.values()),
            quotas=tuple(_without_own(q, own) for q in quotas),
            domain_label=domain_label,
            age_seconds=age_seconds,
        )

    def _without(self, own: Iterable[PodUse]) -> dict[str, NodeView]:
        found: dict[str, NodeView] = {}
        for pod in own:
            node = found.get(pod.node) or self._loaded.get(pod.node)
            if node is not None:
                left = {name: amount - pod.requests.get(name, 0) for name, amount in node.used.items()}
                found[pod.node] = replace(node, used=left)
        return found


def promising(cluster: ClusterView, index: NodeIndex, demands: Iterable[PodDemand], count: int) -> ClusterView:
    """The cluster with only the nodes on which each pod group would most likely find room: those with most devices, then
    most memory, left. What fits here fits the whole cluster; what does not may still fit elsewhere.
    """
    chosen: dict[str, NodeView] = {}
    for demand in demands:
        chosen.update((n.name, n) for n in index.best(demand, count))
    return replace(cluster, nodes=tuple(chosen.values()))


def _without_own(quota: QuotaView, own: Iterable[PodUse]) -> QuotaView:
    """What a quota counts of the pipeline's own pods is free again for its next revision."""
    used = dict(quota.used)
    for pod in own:
        for key in used:
            if key.startswith("limits."):
                mine = (pod.limits or {}).get(key.removeprefix("limits."), 0)
            else:
                mine = pod.requests.get("pods" if key == "count/pods" else key.removeprefix("requests."), 0)
            used[key] = max(0, used[key] - mine)
    return replace(quota, used=used)
