"""Deployments: one per pod group and revision, and one for the entry."""

from __future__ import annotations

from collections.abc import Sequence

from omni_operator.kinds import DEPLOYMENT
from omni_operator.names import (
    ENTRY_STAGE,
    REVISION_LABEL,
    STAGE_LABEL,
    entry_name,
    stage_deployment_name,
    stage_name,
    stage_selector,
)
from omni_operator.resources.child import Child, Scope, build_child
from omni_operator.resources.entry_pod import build_entry_pod
from omni_operator.resources.stage_pod import build_stage_pod
from omni_runtime.deploy.plan import ResolvedPlan, StagePlan

ENTRY_REPLICAS = 1
# Beyond the time that an engine may take to start: scheduling, image pulls, a node that the autoscaler adds.
PROGRESS_SLACK_SECONDS = 300


def build_stage_deployment(scope: Scope, plan: ResolvedPlan, group: Sequence[StagePlan], replicas: int) -> Child:
    """The replicas of one pod group at one revision; the OmniStage of the leader owns it.

    The selector holds the revision, as the name does: both are fixed for the life of the object (T1).
    """
    leader = group[0]
    selector = {**stage_selector(scope.pipeline, leader.name), REVISION_LABEL: plan.revision}
    return build_child(
        DEPLOYMENT,
        scope,
        stage_deployment_name(scope.pipeline, leader.name, plan.revision),
        {
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": selector},
                # A device that is full takes no second pod: inside one revision, replace before adding (T38).
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
                "revisionHistoryLimit": 1,
                "progressDeadlineSeconds": max(s.startup_timeout_seconds for s in group) + PROGRESS_SLACK_SECONDS,
                "template": build_stage_pod(scope, plan, group),
            }
        },
        labels={STAGE_LABEL: leader.name, REVISION_LABEL: plan.revision},
        owner_stage=stage_name(scope.pipeline, leader.name),
    )


def build_entry_deployment(scope: Scope, plan: ResolvedPlan) -> Child:
    """The orchestrator and API server. The old pod answers until the new one is Ready, that is, until every stage of
    the new revision has a live replica."""
    startup = max((s.startup_timeout_seconds for s in plan.stages), default=0)
    return build_child(
        DEPLOYMENT,
        scope,
        entry_name(scope.pipeline),
        {
            "spec": {
                "replicas": ENTRY_REPLICAS,
                "selector": {"matchLabels": stage_selector(scope.pipeline, ENTRY_STAGE)},
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "revisionHistoryLimit": 2,
                "progressDeadlineSeconds": startup + 2 * PROGRESS_SLACK_SECONDS,
                "template": build_entry_pod(scope, plan),
            }
        },
        labels={STAGE_LABEL: ENTRY_STAGE, REVISION_LABEL: plan.revision},
    )
