"""The OmniStage of a stage: the object that `kubectl scale` and autoscalers write to."""

from __future__ import annotations

from collections.abc import Sequence

from omni_operator.kinds import STAGE, JsonObject
from omni_operator.names import (
    REQUESTED_ANNOTATION,
    STAGE_LABEL,
    stage_name,
    stage_selector,
)
from omni_operator.resources.child import Child, Scope, build_child
from omni_runtime.deploy.plan import ReplicaBounds, StagePlan


def build_omnistage(scope: Scope, group: Sequence[StagePlan], stage: StagePlan, bounds: ReplicaBounds | None) -> Child:
    """Without `spec.replicas`: that field has its own manager, which applies it only when the request changes (T12)."""
    spec: JsonObject = {
        "pipelineRef": {"name": scope.pipeline},
        "stageName": stage.name,
        "engine": stage.engine.value,
    }
    if stage.name != group[0].name:
        spec["colocatedWith"] = group[0].name
    if bounds is not None and bounds.maximum is not None:
        spec["minReplicas"] = bounds.minimum
        spec["maxReplicas"] = bounds.maximum
    return build_child(
        STAGE, scope, stage_name(scope.pipeline, stage.name), {"spec": spec}, labels={STAGE_LABEL: stage.name}
    )


def build_replica_request(scope: Scope, stage: str, replicas: int, request: str) -> Child:
    """Body of the replica manager: the count, and the request that it came from, in one write."""
    name = stage_name(scope.pipeline, stage)
    body: JsonObject = {
        "apiVersion": STAGE.api_version,
        "kind": STAGE.kind,
        "metadata": {
            "name": name,
            "namespace": scope.namespace,
            "annotations": {REQUESTED_ANNOTATION: request},
        },
        "spec": {"replicas": replicas},
    }
    return Child(STAGE, name, body)


def scale_selector(scope: Scope, leader: str) -> dict[str, str]:
    """Selector of `/scale`: exactly the pods that a replica count of this stage counts (T16)."""
    return stage_selector(scope.pipeline, leader)
