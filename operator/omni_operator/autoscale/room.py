"""What quota, tenant and nodes leave a pipeline, as the limits of a decision. Pure; placement says where a pod may go.

Two kinds of limit. Accelerators of all stages together (`Limits`): stages may give them to each other. Replicas of one
stage: for a stage with accelerators as many as fit if it had the nodes to itself; for one without, as many as fit
beside the others as they are, because CPU and memory are no part of the solver's budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from omni_crds.v1alpha1.runtimeprofile import MissingNodesPolicy
from omni_operator.autoscale.types import Limits, Spec, StageFleet
from omni_operator.placement import ClusterView, QuotaView, TenantView, plan_demand
from omni_operator.placement.demand import ENTRY, PodDemand, free
from omni_operator.placement.fleet import Fleet, fleet_of
from omni_operator.placement.nodes import accepts, arrange, place
from omni_operator.placement.packing import room
from omni_runtime.deploy.plan import ResolvedPlan


@dataclass(frozen=True, slots=True)
class Room:
    """replicas: of a stage at most, those that it has included. Without an entry: not known to be limited."""

    limits: Limits = field(default_factory=Limits)
    replicas: Mapping[str, int] = field(default_factory=dict)

    def within(self, spec: Spec) -> Spec:
        """The spec with what can be placed of each stage."""
        stages = (
            replace(s, classes=tuple(replace(c, available=self.replicas.get(s.name)) for c in s.classes))
            for s in spec.stages
        )
        return replace(spec, stages=tuple(stages))


def room_for(
    spec: Spec,
    plan: ResolvedPlan,
    cluster: ClusterView,
    fleet: Mapping[str, StageFleet],
    missing_nodes: MissingNodesPolicy | None,
) -> Room:
    """cluster: without the pipeline's own pods. Where nodes come when pods wait for them, they are no limit."""
    counts = {name: f.target for name, f in fleet.items()}
    demands = plan_demand(plan, counts, {})
    draining = {name: f.draining for name, f in fleet.items()}
    limited = _quota_replicas(demands, cluster.quotas)
    placeable = None
    if cluster.nodes is not None and missing_nodes not in (MissingNodesPolicy.WARN, MissingNodesPolicy.IGNORE):
        labels = frozenset(name for d in demands for name in d.node_selector)
        kinds = fleet_of(cluster.nodes, labels)
        for stage in spec.stages:
            fits = max(0, _fits(stage.name, demands, kinds, stage.maximum) - draining.get(stage.name, 0))
            limited[stage.name] = min(fits, limited.get(stage.name, fits))
        placeable = _devices_on(demands, kinds)
        if placeable is not None:
            # What drains holds its devices until it ends.
            placeable = max(0, placeable - sum(draining.get(s.name, 0) * s.devices for s in spec.stages))
    allowed = [
        x for x in (_quota_devices(demands, cluster.quotas), _tenant_devices(demands, cluster.tenant)) if x is not None
    ]
    return Room(Limits(quota=min(allowed, default=None), placeable=placeable), limited)


def _fits(stage: str, demands: Sequence[PodDemand], kinds: Fleet, most: int) -> int:
    mine = next(d for d in demands if d.group == stage)
    if mine.device_resource is not None:
        shelf = arrange([mine], kinds)
        return min(most, room(shelf.items[0], shelf.classes))
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        tried = [
            replace(d, replicas=middle) if d is mine else d for d in demands if d is mine or d.device_resource is None
        ]
        if place(arrange(tried, kinds))[0] is not None:
            low = middle
        else:
            high = middle - 1
    return low


def _devices_on(demands: Sequence[PodDemand], kinds: Fleet) -> int | None:
    """Devices that some stage may use and nobody else has; None for a pipeline without accelerators."""
    using = [d for d in demands if d.device_resource is not None]
    if not using:
        return None
    found = 0
    for node, names, _ in kinds:
        resources = {d.device_resource for d in using if accepts(d, node)}
        found += len(names) * sum(free(node).get(str(r), 0) for r in resources)
    return found


def _quota_devices(demands: Sequence[PodDemand], quotas: Iterable[QuotaView]) -> int | None:
    """None where a resource that the pipeline uses is in no quota."""
    resources = {d.device_resource for d in demands if d.device_resource is not None}
    left: dict[str, int] = {}
    for quota in quotas:
        for key, hard in quota.hard.items():
            name = _plain(key)
            if name in resources:
                rest = max(0, hard - quota.used.get(key, 0))
                left[name] = min(left.get(name, rest), rest)
    return sum(left.values()) if resources and resources == set(left) else None


def _quota_replicas(demands: Sequence[PodDemand], quotas: Iterable[QuotaView]) -> dict[str, int]:
    """What CPU, memory and pods in a quota leave each stage beside the others as they are."""
    found: dict[str, int] = {}
    for quota in quotas:
        for key, hard in quota.hard.items():
            name, left = _plain(key), hard - quota.used.get(key, 0)
            each = {d.group: _amounts(d, key).get(name, 0) for d in demands}
            for demand in demands:
                if demand.group == ENTRY or not each[demand.group] or name == demand.device_resource:
                    continue
                others = sum(each[d.group] * d.replicas for d in demands if d is not demand)
                count = max(0, left - others) // each[demand.group]
                found[demand.group] = min(found.get(demand.group, count), count)
    return found


def _amounts(demand: PodDemand, key: str) -> Mapping[str, int]:
    return demand.limits if key.startswith("limits.") else demand.requests


def _plain(key: str) -> str:
    return "pods" if key == "count/pods" else key.removeprefix("requests.").removeprefix("limits.")


def _tenant_devices(demands: Sequence[PodDemand], tenant: TenantView | None) -> int | None:
    """None where a class that the pipeline uses has no budget."""
    classes = {d.device_class for d in demands if d.device_resource is not None}
    if tenant is None or not classes or not classes <= set(tenant.budget):
        return None
    return sum(max(0, tenant.budget[c] - tenant.used.get(c, 0)) for c in classes)
