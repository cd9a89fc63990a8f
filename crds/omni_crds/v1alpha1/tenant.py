"""OmniTenant: namespaces, budget and what a tenant may use. Cluster-scoped."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from omni_crds.v1alpha1.base import DeviceClassName, Generation, ObjectMeta, ObjectName, OmniModel
from omni_crds.v1alpha1.conditions import Condition
from omni_crds.v1alpha1.markers import ListMap, ListSet


class ClassBudget(OmniModel):
    """Budget of one device class."""

    class_name: Annotated[DeviceClassName, Field(alias="class")]
    """Device class, as runtime profiles name it."""
    count: Annotated[int, Field(ge=0, le=100_000)]
    """Devices of this class that all pipelines of the tenant may use together."""


class TenantSpec(OmniModel):
    """What the tenant may use."""

    namespaces: Annotated[tuple[ObjectName, ...], Field(min_length=1, max_length=256), ListSet()]
    """Namespaces of the tenant."""
    allowed_profiles: Annotated[tuple[ObjectName, ...], Field(max_length=64), ListSet()] | None = None
    """Runtime profiles that its pipelines may name. Without it: all."""
    accelerator_budget: Annotated[tuple[ClassBudget, ...], Field(max_length=64), ListMap(("class",))] | None = None
    """Budget per device class. A class that is not listed has no limit."""
    weight: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Share among tenants when devices are scarce. Without it: 1."""


class TenantStatus(OmniModel):
    """What the tenant uses."""

    conditions: Annotated[tuple[Condition, ...], Field(max_length=16), ListMap(("type",))] | None = None
    """Ready and what stands in its way."""
    observed_generation: Generation | None = None
    """The metadata.generation that this status describes."""


class OmniTenant(OmniModel):
    """A tenant of the platform: its namespaces, its budget and what it may use."""

    metadata: ObjectMeta = Field(default_factory=ObjectMeta)
    spec: TenantSpec
    """What the tenant may use."""
    status: TenantStatus | None = None
    """What the tenant uses. Written by the operator."""
