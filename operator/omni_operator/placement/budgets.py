"""ResourceQuota of the namespace and budget of the tenant. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omni_operator.placement.demand import PodDemand, human
from omni_operator.placement.nodes import total
from omni_operator.placement.types import ClusterView, Constraint, ConstraintKind, QuotaView, TenantView


def over_quota(demands: Sequence[PodDemand], cluster: ClusterView) -> Iterator[tuple[QuotaView, str, int, Constraint]]:
    """(quota, key, what it would have to be, constraint) for every amount that the pods of the plan exceed (T65)."""
    requests, limits = total(demands), total(demands, "limits")
    for quota in cluster.quotas:
        for key, hard in sorted(quota.hard.items()):
            asked = _asked(key, requests, limits)
            used = quota.used.get(key, 0)
            if asked and used + asked > hard:
                name = key.rpartition("requests.")[2].rpartition("limits.")[2]
                users = _users(demands, name)
                message = (
                    f"ResourceQuota {quota.name} allows {human(name, hard)} ({key}); {human(name, used)} are used, "
                    f"and the pipeline asks for {human(name, asked)}"
                )
                yield quota, key, used + asked, Constraint(ConstraintKind.QUOTA, message, users, key)


def _asked(key: str, requests: object, limits: object) -> int:
    assert isinstance(requests, dict) and isinstance(limits, dict)
    if key == "count/pods":
        return int(requests.get("pods", 0))
    if key.startswith("limits."):
        return int(limits.get(key.removeprefix("limits."), 0))
    return int(requests.get(key.removeprefix("requests."), 0))


def class_use(demands: Sequence[PodDemand]) -> dict[str, int]:
    """Device class -> devices of all replicas."""
    found: dict[str, int] = {}
    for demand in demands:
        if demand.device_resource:
            devices = demand.requests.get(demand.device_resource, 0) * demand.replicas
            found[demand.device_class] = found.get(demand.device_class, 0) + devices
    return found


def over_budget(
    demands: Sequence[PodDemand], cluster: ClusterView
) -> Iterator[tuple[TenantView, str, int, Constraint]]:
    """(tenant, class, what its budget would have to be, constraint). A class without a budget has no limit."""
    tenant = cluster.tenant
    if tenant is None:
        return
    for name, count in sorted(class_use(demands).items()):
        budget = tenant.budget.get(name)
        used = tenant.used.get(name, 0)
        if budget is not None and count and used + count > budget:
            message = exceeds(tenant.name, name, count, budget, used)
            users = tuple(d.group for d in demands if d.device_class == name and d.device_resource)
            yield tenant, name, used + count, Constraint(ConstraintKind.TENANT_BUDGET, message, users, name)


def exceeds(tenant: str, device_class: str, count: int, budget: int, used: int) -> str:
    """At admission and afterwards the same words."""
    left = max(0, budget - used)
    return (
        f"the stages ask for {count} {device_class}; tenant {tenant} has {left} left of {budget} "
        f"({used} are in use by its other pipelines)"
    )


def _users(demands: Sequence[PodDemand], name: str) -> tuple[str, ...]:
    ranked = sorted(demands, key=lambda d: -d.requests.get(name, 0) * d.replicas)
    return tuple(d.group for d in ranked if d.requests.get(name))
