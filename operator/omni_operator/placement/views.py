"""Kubernetes objects (as JSON) -> the values that a check takes. Pure.

Pods that have ended hold nothing; pods that are being deleted still do. Pods of the pipeline that is checked are left
out, because the check places all of them anew: an edit must not be refused for the room that its own pods take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator.names import PIPELINE_LABEL, pipeline_label
from omni_operator.placement.demand import amounts, pod_resources
from omni_operator.placement.devices import DeviceSpec
from omni_operator.placement.dra import classes_by_resource, offers, read_class, read_slice, with_offer
from omni_operator.placement.types import ClusterView, NodeView, QuotaView, Resources, Taint, TenantView

T = TypeVar("T")
Json = Mapping[str, Any]


def node_view(node: Json, used: Resources | None = None) -> NodeView:
    """One node; `used` is what its pods request (`usage`)."""
    meta, spec, status = node.get("metadata") or {}, node.get("spec") or {}, node.get("status") or {}
    ready = next((c.get("status") for c in status.get("conditions") or [] if c.get("type") == "Ready"), "True")
    return NodeView(
        name=str(meta.get("name", "")),
        labels={str(name): str(value) for name, value in (meta.get("labels") or {}).items()},
        # A cordoned node carries a taint too, but `unschedulable` is what its owner set.
        taints=tuple(
            Taint(str(t.get("key", "")), str(t.get("value") or ""), str(t.get("effect", "NoSchedule")))
            for t in spec.get("taints") or []
            if t.get("key") != "node.kubernetes.io/unschedulable"
        ),
        allocatable=amounts(status.get("allocatable") or {}),
        used=dict(used or {}),
        schedulable=ready == "True" and not spec.get("unschedulable", False),
    )


def usage(pods: Iterable[Json], without: tuple[str, str] | None = None) -> dict[str, dict[str, int]]:
    """Node -> what its pods request. without: (namespace, pipeline) whose pods do not count."""
    found: dict[str, dict[str, int]] = {}
    for pod in pods:
        node = (pod.get("spec") or {}).get("nodeName")
        if not node or not holds_resources(pod) or (without and belongs_to(pod, *without)):
            continue
        load = found.setdefault(str(node), {})
        for name, amount in pod_resources(pod["spec"]).items():
            load[name] = load.get(name, 0) + amount
    return found


def holds_resources(pod: Json) -> bool:
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def belongs_to(pod: Json, namespace: str, pipeline: str) -> bool:
    meta = pod.get("metadata") or {}
    label = (meta.get("labels") or {}).get(PIPELINE_LABEL)
    return meta.get("namespace") == namespace and label == pipeline_label(pipeline)


def quota_view(quota: Json, own: Iterable[Json] = ()) -> QuotaView:
    """One ResourceQuota. own: pods of the pipeline that is checked, which its `used` counts already.

    A quota with scopes counts only some pods, and which ones is not for us to repeat: it is left out (no limits).
    """
    spec, status = quota.get("spec") or {}, quota.get("status") or {}
    name = str((quota.get("metadata") or {}).get("name", ""))
    if spec.get("scopes") or spec.get("scopeSelector"):
        return QuotaView(name, {})
    hard = amounts(spec.get("hard") or {})
    used = amounts(status.get("used") or {})
    for pod in own:
        if not holds_resources(pod):
            continue
        requests, limits = pod_resources(pod["spec"]), pod_resources(pod["spec"], "limits")
        for key in used:
            plain = key.removeprefix("requests.") if not key.startswith("limits.") else ""
            mine = requests.get("pods" if key == "count/pods" else plain, 0) if plain else limits.get(key[7:], 0)
            used[key] = max(0, used[key] - mine)
    return QuotaView(name, hard, used)


def tenant_view(tenant: OmniTenant, used: Mapping[str, int]) -> TenantView:
    """used: device class -> devices that the tenant's other pipelines use."""
    budget = {b.class_name: b.count for b in tenant.spec.accelerator_budget or ()}
    return TenantView(tenant.metadata.name, budget, dict(used))


def classes_in_use(pods: Iterable[Json], namespaces: Iterable[str], devices: Iterable[DeviceSpec]) -> dict[str, int]:
    """Device class -> devices that pods of these namespaces hold or wait for. A pod counts for the class whose resource
    it asks for and whose nodes it selects; of several such classes for the one that says most about its nodes."""
    known = sorted(devices, key=lambda d: (-len(d.node_selector or {}), d.name))
    chosen, found = frozenset(namespaces), dict[str, int]()
    for pod in pods:
        if (pod.get("metadata") or {}).get("namespace") not in chosen or not holds_resources(pod):
            continue
        requests, selector = pod_resources(pod["spec"]), (pod["spec"].get("nodeSelector") or {})
        for resource in (r for r in requests if "/" in r):
            device = next(
                (
                    d
                    for d in known
                    if d.resource_name == resource and (d.node_selector or {}).items() <= selector.items()
                ),
                None,
            )
            if device is not None:
                found[device.name] = found.get(device.name, 0) + requests[resource]
    return found


def cluster_view(
    nodes: Iterable[Json],
    pods: Iterable[Json] = (),
    quotas: Iterable[Json] = (),
    *,
    slices: Iterable[Json] = (),
    device_classes: Iterable[Json] = (),
    pipeline: tuple[str, str] | None = None,
    tenant: TenantView | None = None,
    nodes_may_be_added: bool = False,
    domain_label: str | None = None,
    age_seconds: float = 0.0,
) -> ClusterView:
    """The cluster for one pipeline (namespace, name). pods: of all namespaces; quotas: of the pipeline's; slices and
    device_classes: DRA's ResourceSlices and DeviceClasses."""
    listed = list(pods)
    offered = offers(_read(read_slice, slices), classes_by_resource(_read(read_class, device_classes)))
    loads = usage(listed, pipeline)
    own = [p for p in listed if pipeline and belongs_to(p, *pipeline)]
    views = [node_view(n, loads.get(str((n.get("metadata") or {}).get("name", "")))) for n in nodes]
    return ClusterView(
        nodes=tuple(with_offer(v, offered[v.name]) if v.name in offered else v for v in views),
        quotas=tuple(quota_view(q, own) for q in quotas),
        tenant=tenant,
        nodes_may_be_added=nodes_may_be_added,
        domain_label=domain_label,
        age_seconds=age_seconds,
    )


def _read(project: Callable[[Json], T | None], bodies: Iterable[Json]) -> list[T]:
    return [value for value in map(project, bodies) if value is not None]
