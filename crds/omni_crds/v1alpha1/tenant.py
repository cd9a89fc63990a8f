"""OmniTenant: namespaces, budget and what a tenant may use. Cluster-scoped."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from omni_crds.v1alpha1.base import ObjectMeta, ObjectName, OmniModel
from omni_crds.v1alpha1.conditions import Condition


class ClassBudget(OmniModel):
    class_name: Annotated[str, Field(alias="class", min_length=1, max_length=63)]
    count: Annotated[int, Field(ge=0, le=100_000)]


class TenantSpec(OmniModel):
    namespaces: Annotated[list[ObjectName], Field(min_length=1, max_length=256)]
    allowed_profiles: Annotated[list[ObjectName], Field(max_length=64)] | None = None
    accelerator_budget: Annotated[list[ClassBudget], Field(max_length=64)] | None = None
    weight: Annotated[int, Field(ge=1, le=1000)] | None = None


class TenantStatus(OmniModel):
    conditions: Annotated[list[Condition], Field(max_length=16)] | None = None
    observed_generation: Annotated[int, Field(ge=0)] | None = None


class OmniTenant(OmniModel):
    metadata: ObjectMeta = Field(default_factory=ObjectMeta)
    spec: TenantSpec
    status: TenantStatus | None = None
