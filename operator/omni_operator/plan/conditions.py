"""The conditions of a pipeline, each from what was seen. Pure.

A condition never changes its message from second to second (no pod names, no counters of restarts): each status write
wakes every watcher. Reconciling and Stalled exist only while true (kstatus).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from omni_crds.v1alpha1.conditions import Condition, ConditionStatus, ConditionType, Reason, truncate
from omni_crds.v1alpha1.pipeline import EdgeStatus
from omni_operator.observed import Scaling
from omni_operator.plan.groups import GroupView
from omni_operator.plan.model import Outcome, OutlookKind, Plan

PROFILE_MISSING = "no OmniRuntimeProfile has this name"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the conditions are derived from."""

    plan: Plan
    outcome: Outcome
    groups: Sequence[GroupView]
    entry: GroupView | None
    serving: bool
    down: Sequence[str]  # leaders without a ready pod in the revision that should answer
    edges: Sequence[EdgeStatus]
    out_of_range: str | None
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    status: ConditionStatus
    reason: Reason
    message: str = ""


TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


def pipeline_conditions(facts: Facts, generation: int, now: datetime) -> tuple[Condition, ...]:
    """In the order in which a person reads them. lastTransitionTime is `now`; merging keeps the old one."""
    stalled = stall(facts)
    if stalled is not None and facts.plan.resolved is None:
        return tuple(make_condition(kind, verdict, generation, now) for kind, verdict in nothing_runs(stalled))
    verdicts: list[tuple[ConditionType, Verdict | None]] = [
        (ConditionType.READY, ready(facts, stalled)),
        (ConditionType.SERVING, serving(facts)),
        (ConditionType.UPDATED, updated(facts)),
        (ConditionType.RECONCILING, None if stalled else reconciling(facts)),
        (ConditionType.STALLED, stalled),
        (ConditionType.PLACEMENT_FEASIBLE, placement(facts)),
        (ConditionType.CONNECTORS_READY, connectors(facts)),
        (ConditionType.SCALING_READY, scaling(facts)),
    ]
    return tuple(make_condition(kind, verdict, generation, now) for kind, verdict in verdicts if verdict is not None)


def nothing_runs(stalled: Verdict) -> Iterator[tuple[ConditionType, Verdict]]:
    """No revision was ever made: the other aspects do not wait for anything, so they must not sound as if they did."""
    nothing = "nothing runs: see Ready"
    yield ConditionType.READY, Verdict(FALSE, stalled.reason, stalled.message)
    yield ConditionType.SERVING, Verdict(FALSE, stalled.reason, nothing)
    yield ConditionType.UPDATED, Verdict(FALSE, stalled.reason, nothing)
    yield ConditionType.STALLED, stalled
    for kind in (ConditionType.PLACEMENT_FEASIBLE, ConditionType.CONNECTORS_READY, ConditionType.SCALING_READY):
        yield kind, Verdict(UNKNOWN, stalled.reason, nothing)


def make_condition(kind: ConditionType, verdict: Verdict, generation: int, now: datetime) -> Condition:
    return Condition(
        type=kind.value,
        status=verdict.status,
        reason=verdict.reason.value,
        message=truncate(verdict.message),
        last_transition_time=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        observed_generation=generation,
    )


def stall(facts: Facts) -> Verdict | None:
    """What needs a human: retrying alone will not help."""
    violations = facts.plan.violations
    if violations:
        missing = all(PROFILE_MISSING in v for v in violations)
        reason = Reason.PROFILE_NOT_FOUND if missing else Reason.INVALID_SPEC
        kept = "; the last good revision keeps running" if facts.plan.resolved else ""
        return Verdict(TRUE, reason, "; ".join(violations) + kept)
    if facts.outcome.failures:
        first = facts.outcome.failures[0]
        text = "; ".join(f"{f.kind} {f.name}: {f.message}" for f in facts.outcome.failures)
        return Verdict(TRUE, first.reason, text)
    for group in facts.groups:
        if group.overdue and not group.complete:
            reason = group.problem.reason if group.problem else Reason.STAGES_NOT_READY
            return Verdict(TRUE, reason, f"{group.leader}: no progress within its deadline: {group.detail}")
    return None


def ready(facts: Facts, stalled: Verdict | None) -> Verdict:
    if stalled is not None:
        return Verdict(FALSE, stalled.reason, stalled.message)
    outlook = facts.plan.outlook
    if facts.entry is None and outlook is not None and outlook.hold:
        return Verdict(FALSE, outlook.reason, f"no pods are made for half a pipeline: {outlook.message}")
    if not facts.groups or facts.entry is None:
        return Verdict(UNKNOWN, Reason.PROGRESSING, "children are being made")
    incomplete = [g for g in facts.groups if not g.complete]
    if incomplete:
        rolling = len(facts.plan.rollout.kept if facts.plan.rollout else ()) > 1
        waiting = Reason.ROLLING_OUT if rolling else Reason.STAGES_NOT_READY
        reason = next((g.problem.reason for g in incomplete if g.problem), waiting)
        return Verdict(FALSE, reason, "; ".join(f"{g.leader}: {g.detail}" for g in incomplete))
    zero = [g.leader for g in facts.groups if g.wanted == 0]
    if zero:
        return Verdict(FALSE, Reason.SCALED_TO_ZERO, f"scaled to zero: {', '.join(zero)}")
    if not facts.entry.complete:
        reason = facts.entry.problem.reason if facts.entry.problem else Reason.ENTRY_NOT_READY
        return Verdict(FALSE, reason, f"entry: {facts.entry.detail}")
    return Verdict(TRUE, Reason.ALL_STAGES_READY, "all stages and the entry are ready on the newest revision")


def serving(facts: Facts) -> Verdict:
    """Are requests answered now? Independent of rollouts (T42); names the stage that is down (T69)."""
    if facts.serving:
        return Verdict(TRUE, Reason.SERVING, "requests are answered")
    if facts.down:
        by_leader = {g.leader: g for g in facts.groups}
        zero = [name for name in facts.down if name in by_leader and by_leader[name].wanted == 0]
        if zero:
            return Verdict(FALSE, Reason.SCALED_TO_ZERO, f"scaled to zero: {', '.join(zero)}")
        # Ready has the whole story of each problem; here its name is enough.
        parts = [f"{name} ({by_leader[name].summary})" if name in by_leader else name for name in facts.down]
        return Verdict(FALSE, Reason.STAGE_DOWN, f"no ready replica of {', '.join(parts)}")
    detail = f"entry: {facts.entry.detail}" if facts.entry else "the entry is not there yet"
    return Verdict(FALSE, Reason.ENTRY_NOT_READY, detail)


def updated(facts: Facts) -> Verdict:
    """Do all replicas run the newest revision? Old pods never count (T41)."""
    rollout = facts.plan.rollout
    if rollout is None or facts.entry is None:
        return Verdict(UNKNOWN, Reason.PROGRESSING, "nothing runs yet")
    behind = [g for g in (*facts.groups, facts.entry) if g.pods > g.updated or g.updated_ready < g.wanted]
    if facts.plan.violations:
        return Verdict(FALSE, Reason.INVALID_SPEC, f"revision {rollout.newest} runs, the spec asks for another")
    if not behind:
        return Verdict(TRUE, Reason.UP_TO_DATE, f"all replicas run revision {rollout.newest}")
    blocked = "; ".join(
        f"{leader} cannot run beside its old revision: {why}" for leader, why in rollout.blocked.items()
    )
    parts = ", ".join(f"{g.leader} {g.updated_ready}/{g.wanted}" for g in behind)
    return Verdict(
        FALSE, Reason.ROLLING_OUT, f"revision {rollout.newest}: {parts}" + (f"; {blocked}" if blocked else "")
    )


def reconciling(facts: Facts) -> Verdict | None:
    is_ready, is_updated = ready(facts, None), updated(facts)
    if is_updated.status is not TRUE and is_ready.reason is not Reason.SCALED_TO_ZERO:
        if len(facts.plan.rollout.kept if facts.plan.rollout else ()) > 1:
            return Verdict(TRUE, Reason.ROLLING_OUT, is_updated.message)
        return Verdict(TRUE, Reason.PROGRESSING, is_ready.message)
    if is_ready.status is TRUE or is_ready.reason is Reason.SCALED_TO_ZERO:
        return None
    return Verdict(TRUE, Reason.PROGRESSING, is_ready.message)


def placement(facts: Facts) -> Verdict:
    stuck = [g for g in facts.groups if g.problem and g.problem.reason is Reason.UNSCHEDULABLE]
    outlook = facts.plan.outlook
    if outlook is not None and outlook.kind is OutlookKind.INFEASIBLE:
        # What the scheduler says of one pod is in Ready; here is what stands in the way of the whole, and what helps.
        return Verdict(FALSE, outlook.reason, outlook.message)
    if stuck:
        parts = "; ".join(f"{g.leader}: {g.problem.message}" for g in stuck if g.problem)
        return Verdict(FALSE, Reason.UNSCHEDULABLE, f"{outlook.message}; {parts}" if outlook else parts)
    quota = [g for g in facts.groups if g.problem and g.problem.reason is Reason.QUOTA_EXCEEDED]
    if quota:
        parts = "; ".join(f"{g.leader}: {g.problem.message}" for g in quota if g.problem)
        return Verdict(FALSE, Reason.QUOTA_EXCEEDED, parts)
    if facts.groups and all(g.scheduled >= g.wanted for g in facts.groups):
        return Verdict(TRUE, Reason.FEASIBLE, "every replica has a node")
    waiting = outlook.message if outlook is not None else "not every replica has been scheduled yet"
    return Verdict(UNKNOWN, Reason.PROGRESSING, waiting)


def connectors(facts: Facts) -> Verdict:
    if not facts.edges:
        return Verdict(UNKNOWN, Reason.PROGRESSING, "no edge exists yet")
    broken = [f"{e.source}->{e.to}" for e in facts.edges if e.ready != "True"]
    if broken:
        return Verdict(FALSE, Reason.STAGES_NOT_READY, f"not connected: {', '.join(broken)}")
    for reason in (Reason.BACKPRESSURED, Reason.DEGRADED):  # they work, but not as well as they should
        told = [
            f"{e.source}->{e.to}: {e.reason.partition(': ')[2]}" for e in facts.edges if e.reason.startswith(reason)
        ]
        if told:
            return Verdict(TRUE, reason, "; ".join(told))
    return Verdict(TRUE, Reason.REACHABLE, "both ends of every edge are ready")


def scaling(facts: Facts) -> Verdict:
    if facts.out_of_range is not None:
        return Verdict(FALSE, Reason.OUT_OF_RANGE, facts.out_of_range)
    own = facts.scaling
    if own is not None:
        return Verdict(TRUE if own.ready else FALSE, own.reason, own.message)
    return Verdict(TRUE, Reason.MANUAL, "replica counts are taken from the OmniStages")
