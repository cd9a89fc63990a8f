"""OmniStage: one stage pool. Its `spec.replicas` is the one place where a replica count lives."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from omni_crds.v1alpha1.base import ObjectMeta, ObjectName, OmniModel, Replicas, StageName
from omni_crds.v1alpha1.conditions import Condition


class PipelineRef(OmniModel):
    name: ObjectName


class OmniStageSpec(OmniModel):
    pipeline_ref: PipelineRef
    stage_name: StageName
    engine: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    replicas: Replicas | None = None  # no default (T13); seeded by the operator, then owned by whoever scales (T12)
    # Stages of one pod group share pods: only the leader's replicas count, followers name the leader.
    colocated_with: StageName | None = None
    min_replicas: Replicas | None = None
    max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = None


class OmniStageStatus(OmniModel):
    conditions: Annotated[list[Condition], Field(max_length=16)] | None = None
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    replicas: Annotated[int, Field(ge=0)] | None = None
    ready_replicas: Annotated[int, Field(ge=0)] | None = None
    updated_replicas: Annotated[int, Field(ge=0)] | None = None
    selector: Annotated[str, Field(max_length=1024)] | None = None  # for /scale; HPA refuses an empty one (T16)
    revision: Annotated[str, Field(max_length=63)] | None = None
    device: Annotated[str, Field(max_length=128)] | None = None


class OmniStage(OmniModel):
    metadata: ObjectMeta = Field(default_factory=ObjectMeta)
    spec: OmniStageSpec
    status: OmniStageStatus | None = None
