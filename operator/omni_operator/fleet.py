"""Nodes and what runs on them, read when a pipeline waits for a place or wants more of them. Advisory: a failure means
"not known".

One reading serves all pipelines for a few seconds: in a full cluster many of them wait at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator import logs
from omni_operator.errors import KubeError
from omni_operator.kinds import DEVICE_CLASS, NODE, POD, QUOTA, SLICE, TENANT, JsonObject, Kind
from omni_operator.kube import KubeApi
from omni_operator.observe import parse_tenant
from omni_operator.observed import Key
from omni_operator.placement import Catalogue, ClusterView, TenantView
from omni_operator.placement.views import belongs_to, classes_in_use, cluster_view, tenant_view

FRESH_SECONDS = 5.0
# What counts of a pod that is kept; the rest of it is not.
_SPEC = ("containers", "initContainers", "overhead", "nodeName", "nodeSelector")


@dataclass(frozen=True, slots=True)
class _Reading:
    nodes: tuple[JsonObject, ...]
    pods: tuple[JsonObject, ...]
    slices: tuple[JsonObject, ...]
    device_classes: tuple[JsonObject, ...]
    at: float


class FleetReader:
    def __init__(self, kube: KubeApi, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._monotonic = monotonic
        self._reading: _Reading | None = None
        self._lock = asyncio.Lock()

    async def view(self, key: Key) -> ClusterView | None:
        """The cluster for one pipeline, without its own pods; None where it cannot be read, or has no node at all."""
        view = await self._view(key)
        # A control plane alone: whoever runs it knows that nothing will be scheduled.
        return view if view is not None and view.nodes else None

    async def view_with_tenant(self, key: Key, profiles: Mapping[str, OmniRuntimeProfile]) -> ClusterView | None:
        """The same with what its tenant's other pipelines use. profiles: what classes there are. Without a single node
        they are not known, and quotas and tenants limit all the same."""
        view, tenant = await self._view(key), await self.tenant_of(key.namespace)
        if view is None or self._reading is None:
            return None
        usage = _usage_of(tenant, self._reading.pods, key, profiles) if tenant is not None else None
        return replace(view, nodes=view.nodes or None, tenant=usage)

    async def _view(self, key: Key) -> ClusterView | None:
        try:
            reading = await self._read()
            quotas = await self._kube.list(QUOTA, key.namespace)
        except KubeError as error:
            logs.warning("fleet.unread", pipeline=str(key), error=str(error))
            return None
        age = self._monotonic() - reading.at
        view = cluster_view(
            reading.nodes,
            reading.pods,
            quotas.items,
            slices=reading.slices,
            device_classes=reading.device_classes,
            pipeline=(key.namespace, key.name),
        )
        return replace(view, age_seconds=age)

    async def tenant_of(self, namespace: str) -> OmniTenant | None:
        """None: the namespace has none, or tenants cannot be read. Two claim it: the first by name, as admission has it."""
        try:
            listing = await self._kube.list(TENANT, None)
        except KubeError as error:
            logs.warning("fleet.tenants_unread", error=str(error))
            return None
        found = sorted((t for t in map(parse_tenant, listing.items) if t is not None), key=lambda t: t.metadata.name)
        return next((t for t in found if namespace in t.spec.namespaces), None)

    async def _read(self) -> _Reading:
        async with self._lock:
            known = self._reading
            if known is not None and self._monotonic() - known.at < FRESH_SECONDS:
                return known
            started = self._monotonic()
            nodes = await self._kube.list(NODE, None)
            pods = await self._kube.list(POD, None)
            slices, classes = await self._optional(SLICE), await self._optional(DEVICE_CLASS)
            slim = tuple(_slim(p) for p in pods.items)
            self._reading = _Reading(tuple(nodes.items), slim, slices, classes, started)
            return self._reading

    async def _optional(self, kind: Kind) -> tuple[JsonObject, ...]:
        """Nothing where the API server does not serve the kind."""
        try:
            return tuple((await self._kube.list(kind, None)).items)
        except KubeError as error:
            if error.status == 404:
                return ()
            raise


def _usage_of(
    tenant: OmniTenant, pods: tuple[JsonObject, ...], key: Key, profiles: Mapping[str, OmniRuntimeProfile]
) -> TenantView:
    devices = {d.name: d for d in Catalogue.of(profiles).classes.values() if d.resource_name}
    others = (p for p in pods if not belongs_to(p, key.namespace, key.name))
    return tenant_view(tenant, classes_in_use(others, tenant.spec.namespaces, devices.values()))


def _slim(pod: JsonObject) -> JsonObject:
    """The parts of a pod that say whose it is, where, and what it asks for."""
    meta, spec = pod.get("metadata") or {}, pod.get("spec") or {}
    return {
        "metadata": {"namespace": meta.get("namespace"), "labels": meta.get("labels") or {}},
        "spec": {
            name: _resources(spec[name]) if isinstance(spec[name], list) else spec[name]
            for name in _SPEC
            if name in spec
        },
        "status": {"phase": (pod.get("status") or {}).get("phase")},
    }


def _resources(containers: list[JsonObject]) -> list[JsonObject]:
    return [{k: c[k] for k in ("resources", "restartPolicy") if k in c} for c in containers]
