"""OmniStage: one stage pool. Its `spec.replicas` is the one place where a replica count lives."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from omni_crds.v1alpha1.base import (
    Count,
    DeviceText,
    Generation,
    Identifier,
    ObjectMeta,
    ObjectName,
    OmniModel,
    PositiveReplicas,
    Replicas,
    RevisionName,
    StageName,
)
from omni_crds.v1alpha1.conditions import Condition
from omni_crds.v1alpha1.markers import ListMap, Rule, rules


class PipelineRef(OmniModel):
    """The pipeline of a stage, in the same namespace."""

    name: ObjectName
    """Name of the OmniPipeline."""


class OmniStageSpec(OmniModel):
    """What the stage pool should be."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            # Identity: another pipeline or stage is another pool, with other pods behind another selector.
            Rule("self.pipelineRef == oldSelf.pipelineRef", "pipelineRef cannot change: make another OmniStage"),
            Rule("self.stageName == oldSelf.stageName", "stageName cannot change: make another OmniStage"),
            # replicas outside of the bounds is no error: the bounds may narrow while a pool is larger.
            Rule(
                "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
                "minReplicas must not be above maxReplicas",
            ),
            Rule(
                "!has(self.colocatedWith) || self.colocatedWith != self.stageName",
                "a stage cannot be colocated with itself: leave colocatedWith out for the leader of a pod group",
            ),
        )
    )

    pipeline_ref: PipelineRef
    """The pipeline that this pool belongs to."""
    stage_name: StageName
    """Name of the stage in the pipeline."""
    engine: Identifier | None = None
    """Engine that runs the stage."""
    # No default (T13). Seeded by the operator, which GET /scale needs; then owned by whoever scales (T12).
    replicas: Replicas | None = None
    """Number of replicas. kubectl scale, an HPA or the operator's own autoscaler writes it."""
    colocated_with: StageName | None = None
    """Stages of one pod group share pods: only the leader's replicas count, the others name the leader here."""
    min_replicas: Replicas | None = None
    """Lower bound for automatic scaling."""
    max_replicas: PositiveReplicas | None = None
    """Upper bound for automatic scaling."""


class OmniStageStatus(OmniModel):
    """What the stage pool is."""

    conditions: Annotated[tuple[Condition, ...], Field(max_length=16), ListMap(("type",))] | None = None
    """Ready and what stands in its way."""
    observed_generation: Generation | None = None
    """The metadata.generation that this status describes."""
    replicas: Count | None = None
    """Pods that exist."""
    ready_replicas: Count | None = None
    """Pods that serve."""
    updated_replicas: Count | None = None
    """Pods of the newest revision."""
    selector: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Label selector of the pods, for /scale. An HPA refuses an empty one (T16)."""
    revision: RevisionName | None = None
    """Newest revision that has a pod."""
    device: DeviceText | None = None
    """Devices of one replica."""


class OmniStage(OmniModel):
    """One stage pool of a pipeline; the operator makes one per stage. kubectl scale works on it."""

    metadata: ObjectMeta = Field(default_factory=ObjectMeta)
    spec: OmniStageSpec
    """What the stage pool should be."""
    status: OmniStageStatus | None = None
    """What the stage pool is. Written by the operator."""
