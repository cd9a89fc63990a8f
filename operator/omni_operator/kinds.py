"""The Kubernetes kinds that the operator touches, and the JSON alias for their wire form. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omni_crds.v1alpha1.base import GROUP, VERSION

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path below the server's address; `namespace=None` means all namespaces (or a cluster-scoped kind)."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if self.namespaced and namespace is not None else ""
        return "/".join([f"{root}{scope}/{self.plural}", *(part for part in (name, subresource) if part)])


PIPELINE = Kind(GROUP, VERSION, "OmniPipeline", "omnipipelines")
STAGE = Kind(GROUP, VERSION, "OmniStage", "omnistages")
PROFILE = Kind(GROUP, VERSION, "OmniRuntimeProfile", "omniruntimeprofiles", namespaced=False)
TENANT = Kind(GROUP, VERSION, "OmniTenant", "omnitenants", namespaced=False)
POD = Kind("", "v1", "Pod", "pods")
SERVICE = Kind("", "v1", "Service", "services")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
SECRET = Kind("", "v1", "Secret", "secrets")
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
NAMESPACE = Kind("", "v1", "Namespace", "namespaces", namespaced=False)
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
NODE = Kind("", "v1", "Node", "nodes", namespaced=False)
QUOTA = Kind("", "v1", "ResourceQuota", "resourcequotas")
SLICE = Kind("resource.k8s.io", "v1", "ResourceSlice", "resourceslices", namespaced=False)
DEVICE_CLASS = Kind("resource.k8s.io", "v1", "DeviceClass", "deviceclasses", namespaced=False)
EVENT = Kind("events.k8s.io", "v1", "Event", "events")
CRD = Kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False)

# What one pipeline owns and the operator reads back. The Secret is not here: it is created, never read (T62).
CHILD_KINDS = (
    SERVICE_ACCOUNT,
    CONFIG_MAP,
    SERVICE,
    NETWORK_POLICY,
    DISRUPTION_BUDGET,
    STAGE,
    DEPLOYMENT,
)
