"""The whole status of a pipeline and of its stages, computed once from what was seen. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from omni_crds.v1alpha1.conditions import Condition, ConditionStatus, ConditionType, Reason, merge_conditions, truncate
from omni_crds.v1alpha1.pipeline import ConnectorType, EdgeStatus, PipelineStatus, StageStatus
from omni_operator.edges import EdgeHealth
from omni_operator.names import (
    ENTRY_STAGE,
    api_service_name,
    plan_name,
    stage_name,
)
from omni_operator.observed import Live, Observed
from omni_operator.plan.conditions import Facts, pipeline_conditions
from omni_operator.plan.groups import GroupView, ready_at, view_group
from omni_operator.plan.model import Note, Outcome, Plan
from omni_operator.plan.pods import is_finished
from omni_operator.plan.replicas import current_replicas, outside_bounds
from omni_operator.plan.spec import last_serving, stored_plan
from omni_operator.resources.deployment import ENTRY_REPLICAS
from omni_runtime.deploy.plan import DevicePlan, ResolvedPlan

# A TTFP that moved less than this is the same TTFP: measurements must not cause a write each.
TTFP_CHANGE = 0.1


@dataclass(frozen=True, slots=True)
class StatusPlan:
    """The status to write (camelCase JSON), and the Events that its changes are worth."""

    status: Mapping[str, Any]
    notes: tuple[Note, ...]
    groups: tuple[GroupView, ...]


def plan_status(observed: Observed, plan: Plan, outcome: Outcome, now: datetime) -> StatusPlan | None:
    """None: the pipeline is gone or going, there is nothing to say."""
    live = observed.pipeline_live
    if live is None or live.deleting:
        return None
    old = parse_status(live.status)
    groups, entry = _views(observed, plan)
    serving, down = _serving(observed, plan, groups)
    edges = _edges(plan.resolved, groups, observed.edges)
    facts = Facts(plan, outcome, groups, entry, serving, down, edges, _out_of_range(observed, plan), observed.scaling)
    fresh = pipeline_conditions(facts, live.generation, now)
    conditions = merge_conditions(old.conditions or (), fresh)
    resolved = plan.resolved
    stages = _stages(resolved, plan, groups)
    status = PipelineStatus(
        conditions=list(conditions),
        observed_generation=live.generation,
        stages=stages,
        edges=list(edges),
        stages_ready=f"{_count_ready(stages, groups, resolved)}/{len(stages)}" if stages else None,
        revision=resolved.revision if resolved else old.revision,
        serving_revision=_serving_revision(observed, plan),
        plan_config_map=plan_name(observed.key.name, resolved.revision) if resolved else old.plan_config_map,
        endpoint=_endpoint(observed, resolved),
        ttfp_milliseconds_p95=settled_ttfp(old.ttfp_milliseconds_p95, observed.ttfp_milliseconds_p95)
        if serving
        else None,
        # A restarted operator has decided nothing yet: what was said before still stands.
        decisions=observed.scaling.decisions if observed.scaling is not None else old.decisions,
        learned=observed.scaling.learned if observed.scaling is not None else old.learned,
    )
    notes = transitions(old.conditions or (), conditions)
    return StatusPlan(status.model_dump(by_alias=True, exclude_none=True, mode="json"), notes, tuple(groups))


def parse_status(raw: Mapping[str, Any]) -> PipelineStatus:
    """What we wrote before; a status that does not parse (another version's) counts as none.

    What was learned must not take the rest with it: memory.py reads it again, and says why where it does not parse.
    """
    for tried in (raw, {key: value for key, value in raw.items() if key != "learned"}):
        try:
            return PipelineStatus.model_validate(tried)
        except ValidationError:
            continue
    return PipelineStatus()


def transitions(old: Iterable[Condition], new: Iterable[Condition]) -> tuple[Note, ...]:
    """Events for what a person wants to hear of: Ready reached, Serving lost or recovered, no place found, Stalled."""
    before = {c.type: c for c in old}
    notes = []
    for condition in new:
        previous = before.get(condition.type)
        same = previous is not None and previous.status == condition.status
        if condition.type == ConditionType.STALLED and not (same and previous and previous.reason == condition.reason):
            notes.append(Note(Reason(condition.reason), condition.message, warning=True))
        elif condition.type == ConditionType.CONNECTORS_READY and (note := _edge_note(previous, condition)) is not None:
            notes.append(note)
        elif same:
            continue
        elif condition.type == ConditionType.PLACEMENT_FEASIBLE and condition.status is ConditionStatus.FALSE:
            notes.append(Note(Reason(condition.reason), condition.message, warning=True))
        elif condition.type == ConditionType.READY and condition.status is ConditionStatus.TRUE:
            notes.append(Note(Reason.ALL_STAGES_READY, condition.message))
        elif condition.type == ConditionType.SERVING and previous is not None:
            if condition.status is ConditionStatus.TRUE:
                notes.append(Note(Reason.RECOVERED, condition.message))
            else:
                notes.append(Note(Reason(condition.reason), condition.message, warning=True))
    return tuple(notes)


def _edge_note(previous: Condition | None, condition: Condition) -> Note | None:
    """Edges that do worse than they should, or have got well again: the condition stays True, its reason changes."""
    worse = (Reason.DEGRADED, Reason.BACKPRESSURED)
    if previous is not None and previous.reason == condition.reason:
        return None
    if condition.reason in worse:
        return Note(Reason(condition.reason), condition.message, warning=True)
    if previous is not None and previous.reason in worse and condition.reason == Reason.REACHABLE:
        return Note(Reason.RECOVERED, condition.message)
    return None


def device_text(device: DevicePlan) -> str:
    if device.resource_name is None:
        return device.device_class
    share = f" ({device.memory_fraction:g} of its memory)" if device.memory_fraction < 1 else ""
    return f"{device.count} x {device.device_class}{share}"


def _views(observed: Observed, plan: Plan) -> tuple[list[GroupView], GroupView | None]:
    resolved = plan.resolved
    if resolved is None:
        return [], None
    groups = [
        view_group(observed, leader, resolved.revision, plan.wanted.get(leader, 0)) for leader in resolved.pod_groups()
    ]
    if observed.entry_deployment is None:
        return groups, None
    return groups, view_group(observed, ENTRY_STAGE, resolved.revision, ENTRY_REPLICAS)


def _serving(observed: Observed, plan: Plan, groups: Sequence[GroupView]) -> tuple[bool, list[str]]:
    """(requests are answered, leaders that are down in the revision that answers or should)."""
    rollout = plan.rollout
    if rollout is None or plan.resolved is None:
        return False, []
    revision = rollout.serving or rollout.kept[-1]
    answering = plan.resolved if revision == plan.resolved.revision else stored_plan(observed, revision)
    leaders = list(answering.pod_groups()) if answering else [g.leader for g in groups]
    down = [leader for leader in leaders if ready_at(observed, leader, revision) == 0]
    return rollout.serving is not None and not down, down


def _serving_revision(observed: Observed, plan: Plan) -> str | None:
    """The one that answers now, or that answered last while its entry is still there (an entry may blink)."""
    serving = plan.rollout.serving if plan.rollout else None
    if serving is not None:
        return serving
    last = last_serving(observed)
    alive = {p.revision for p in observed.pods_of(ENTRY_STAGE) if not is_finished(p)}
    return last if last in alive else None


def _edges(
    plan: ResolvedPlan | None, groups: Sequence[GroupView], said: Mapping[str, EdgeHealth]
) -> tuple[EdgeStatus, ...]:
    if plan is None:
        return ()
    ready = {g.leader: g.updated_ready > 0 for g in groups}
    found = []
    for edge in plan.edges:
        missing = [end for end in (edge.source, edge.to) if not ready.get(plan.stage(end).pod_group, False)]
        health = said.get(edge.name, EdgeHealth())
        reason, text = (Reason.STAGE_DOWN, ", ".join(missing)) if missing else (health.reason, health.text)
        found.append(
            EdgeStatus(
                source=edge.source,
                to=edge.to,
                connector=ConnectorType(edge.connector),
                in_use=list(health.in_use) or None,
                ready="False" if missing else "True",
                reason=truncate(f"{reason}: {text}" if text else reason.value, 128),
            )
        )
    return tuple(found)


def _stages(plan: ResolvedPlan | None, decided: Plan, groups: Sequence[GroupView]) -> list[StageStatus]:
    if plan is None:
        return []
    by_leader = {g.leader: g for g in groups}
    found = []
    for stage in plan.stages:
        group = by_leader[stage.pod_group]
        shares = f"shares the pods of {stage.pod_group}" if stage.pod_group != stage.name else None
        problem = f"{group.problem.reason}: {group.problem.message}" if group.problem else None
        found.append(
            StageStatus(
                name=stage.name,
                replicas=group.pods,
                desired_replicas=decided.wanted.get(stage.pod_group, 0),
                ready_replicas=group.ready,
                updated_replicas=group.updated,
                revision=plan.revision,
                device=device_text(stage.device)[:128],
                message=truncate(problem) if problem else shares,
            )
        )
    return found


def _count_ready(stages: Sequence[StageStatus], groups: Sequence[GroupView], plan: ResolvedPlan | None) -> int:
    good = {g.leader for g in groups if g.updated_ready >= g.wanted > 0}
    return sum(1 for s in stages if plan is not None and plan.stage(s.name).pod_group in good)


def _out_of_range(observed: Observed, plan: Plan) -> str | None:
    if plan.resolved is None:
        return None
    problems = []
    for leader, count in plan.wanted.items():
        live = observed.stage_named(stage_name(observed.key.name, leader))
        problem = (
            outside_bounds(count, plan.resolved.replicas.get(leader)) if current_replicas(live) is not None else None
        )
        if problem is not None:
            problems.append(f"{leader}: {problem}")
    return "; ".join(problems) or None


def _endpoint(observed: Observed, plan: ResolvedPlan | None) -> str | None:
    if plan is None:
        return None
    port = "" if plan.entry.port == 80 else f":{plan.entry.port}"
    return f"http://{api_service_name(observed.key.name)}.{observed.key.namespace}.svc{port}/v1"


def settled_ttfp(old: int | None, new: int | None) -> int | None:
    """Two significant digits, and the old value while the new one is close to it (T7)."""
    if new is None:
        return old
    rounded = int(float(f"{new:.1e}"))
    return old if old is not None and abs(rounded - old) <= TTFP_CHANGE * old else rounded


def live_status_differs(live: Live, status: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any] | None:
    """The merge patch that brings the live status to `status`, or None. Known fields that are not set become null."""
    current = live.status
    wanted: dict[str, Any] = dict(status)
    patch = {key: value for key, value in wanted.items() if current.get(key) != value}
    patch |= {key: None for key in known if key in current and key not in wanted}
    return patch or None
