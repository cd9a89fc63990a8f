"""Status of OmniStages: of our own, and of those that somebody made by hand. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from omni_crds.v1alpha1.conditions import Condition, ConditionStatus, ConditionType, Reason, merge_conditions
from omni_crds.v1alpha1.stage import OmniStageStatus
from omni_operator.names import selector_string, stage_name, stage_selector
from omni_operator.observed import LiveStage, Observed
from omni_operator.plan.conditions import Verdict, make_condition
from omni_operator.plan.groups import GroupView
from omni_operator.plan.model import Plan
from omni_operator.plan.replicas import current_replicas, outside_bounds
from omni_operator.plan.status import device_text
from omni_runtime.deploy.plan import StagePlan

TRUE, FALSE = ConditionStatus.TRUE, ConditionStatus.FALSE


def plan_stage_statuses(
    observed: Observed, plan: Plan, groups: Sequence[GroupView], now: datetime
) -> Iterator[tuple[LiveStage, Mapping[str, Any]]]:
    """(stage, its status) for every stage that exists; equal to what is there in the normal case."""
    by_leader = {g.leader: g for g in groups}
    resolved = plan.resolved
    for stage in resolved.stages if resolved else ():
        live = observed.stage_named(stage_name(observed.key.name, stage.name))
        if live is not None and not live.live.deleting:
            yield live, _own_status(observed, plan, stage, live, by_leader[stage.pod_group], now)
    for foreign in observed.foreign_stages:
        if not foreign.live.deleting:
            yield foreign, _foreign_status(observed, foreign, now)


def _own_status(
    observed: Observed, plan: Plan, stage: StagePlan, live: LiveStage, group: GroupView, now: datetime
) -> Mapping[str, Any]:
    generation = live.live.generation
    verdicts: list[tuple[ConditionType, Verdict]] = []
    if group.complete:
        zero = Verdict(TRUE, Reason.SCALED_TO_ZERO, "no replica is wanted")
        some = Verdict(TRUE, Reason.REPLICAS_READY, group.detail)
        verdicts.append((ConditionType.READY, some if group.wanted else zero))
    else:
        reason = group.problem.reason if group.problem else Reason.REPLICAS_NOT_READY
        verdicts.append((ConditionType.READY, Verdict(FALSE, reason, group.detail)))
        verdicts.append((ConditionType.RECONCILING, Verdict(TRUE, Reason.PROGRESSING, group.detail)))
    verdicts.append((ConditionType.SCALING_READY, _scaling(plan, stage, live, group)))
    return _dump(
        OmniStageStatus(
            conditions=list(_conditions(live, verdicts, generation, now)),
            observed_generation=generation,
            replicas=group.pods,
            ready_replicas=group.ready,
            updated_replicas=group.updated,
            selector=selector_string(stage_selector(observed.key.name, stage.pod_group)),
            revision=group.revision,
            device=device_text(stage.device)[:128],
        )
    )


def _scaling(plan: Plan, stage: StagePlan, live: LiveStage, group: GroupView) -> Verdict:
    own = current_replicas(live)
    if stage.pod_group != stage.name:
        if own is not None and own != group.wanted:
            message = f"spec.replicas {own} has no effect: the stage shares the pods of {stage.pod_group}, which has {group.wanted}"
            return Verdict(FALSE, Reason.FOLLOWS_LEADER, f"{message}; scale {stage.pod_group}")
        return Verdict(TRUE, Reason.FOLLOWS_LEADER, f"the replicas are those of {stage.pod_group}")
    bounds = plan.resolved.replicas.get(stage.name) if plan.resolved else None
    problem = outside_bounds(own, bounds) if own is not None else None
    if problem is not None:
        return Verdict(FALSE, Reason.OUT_OF_RANGE, problem)
    return Verdict(TRUE, Reason.MANUAL, "spec.replicas belongs to whoever scales")


def _foreign_status(observed: Observed, foreign: LiveStage, now: datetime) -> Mapping[str, Any]:
    """A stage that a person made, or whose pipeline is another one of the same name: never acted upon, but answered."""
    pipeline = observed.key.name
    exists = observed.pipeline_live is not None
    message = (
        f"pipeline {pipeline} exists but does not control this object; the operator makes the stages of a pipeline "
        "itself, so delete this one and describe the stage in the pipeline"
        if exists
        else f"no pipeline {pipeline} exists in this namespace; stages are made by the operator from a pipeline"
    )
    generation = foreign.live.generation
    verdicts = [
        (ConditionType.READY, Verdict(FALSE, Reason.NOT_OWNED, message)),
        (ConditionType.STALLED, Verdict(TRUE, Reason.NOT_OWNED, message)),
    ]
    return _dump(
        OmniStageStatus(
            conditions=list(_conditions(foreign, verdicts, generation, now)), observed_generation=generation
        )
    )


def _conditions(
    live: LiveStage, verdicts: Sequence[tuple[ConditionType, Verdict]], generation: int, now: datetime
) -> tuple[Condition, ...]:
    old: Sequence[Condition] = ()
    with contextlib.suppress(ValidationError):  # another version's status counts as none
        old = OmniStageStatus.model_validate(live.live.status).conditions or ()
    return merge_conditions(old, [make_condition(kind, verdict, generation, now) for kind, verdict in verdicts])


def _dump(status: OmniStageStatus) -> Mapping[str, Any]:
    return status.model_dump(by_alias=True, exclude_none=True, mode="json")
