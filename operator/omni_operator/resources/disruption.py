"""PodDisruptionBudgets: a node drain takes one replica of a pool at a time."""

from __future__ import annotations

from omni_operator.kinds import DISRUPTION_BUDGET
from omni_operator.names import ENTRY_STAGE, STAGE_LABEL, entry_name, stage_name, stage_selector
from omni_operator.resources.child import Child, Scope, build_child


def build_stage_budget(scope: Scope, leader: str) -> Child:
    """`maxUnavailable: 1`, not `minAvailable`: a pool of one replica must not block a node drain for ever."""
    return _budget(scope, stage_name(scope.pipeline, leader), leader, stage_name(scope.pipeline, leader))


def build_entry_budget(scope: Scope) -> Child:
    return _budget(scope, entry_name(scope.pipeline), ENTRY_STAGE, None)


def _budget(scope: Scope, name: str, stage: str, owner: str | None) -> Child:
    return build_child(
        DISRUPTION_BUDGET,
        scope,
        name,
        {
            "spec": {
                "maxUnavailable": 1,
                "selector": {"matchLabels": stage_selector(scope.pipeline, stage)},
                # A pod that is not ready protects nobody and may go.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            }
        },
        labels={STAGE_LABEL: stage},
        owner_stage=owner,
    )
