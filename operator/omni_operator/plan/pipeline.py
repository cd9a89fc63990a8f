"""plan_pipeline: Observed + clock -> Plan. Pure; reads top to bottom."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from omni_crds.v1alpha1.conditions import Reason
from omni_operator.names import stage_name
from omni_operator.observed import Observed
from omni_operator.plan.children import plan_deletes, plan_writes
from omni_operator.plan.model import Note, Plan, Rollout, Write
from omni_operator.plan.pods import waits_for_keys
from omni_operator.plan.replicas import current_replicas, plan_replica_request
from omni_operator.plan.rollout import plan_rollout
from omni_operator.plan.spec import last_good_plan, last_serving, resolve_spec, rollout_of
from omni_runtime.deploy.plan import ResolvedPlan

DEFAULT_MAX_UNAVAILABLE = 1


def plan_pipeline(observed: Observed, *, now: datetime, default_profile: str | None = None) -> Plan:
    """What to do next for one pipeline."""
    if observed.pipeline_live is None or observed.pipeline_live.deleting:
        return Plan(resolved=None)  # children go by owner reference; whatever is made now would be orphaned (T50, T51)
    resolved, violations = resolve_spec(observed, default_profile)
    running = resolved or last_good_plan(observed)
    if running is None:
        return Plan(resolved=None, violations=violations)
    wanted = wanted_replicas(observed, running)
    rollout_spec = rollout_of(observed)
    rollout = plan_rollout(
        observed,
        running.revision,
        wanted,
        strategy=rollout_spec.strategy,
        max_unavailable=(
            DEFAULT_MAX_UNAVAILABLE if rollout_spec.max_unavailable is None else rollout_spec.max_unavailable
        ),
        last_serving=last_serving(observed),
        now=now,
    )
    writes = plan_writes(observed, running, rollout, wanted)
    return Plan(
        resolved=running,
        violations=violations,
        wanted=wanted,
        rollout=rollout,
        writes=writes,
        deletes=plan_deletes(observed, running, rollout),
        notes=_notes(observed, running, rollout, writes),
        keys_missing=any(waits_for_keys(pod, now) for pod in observed.pods),
        requeue_after=rollout.requeue_after,
    )


def wanted_replicas(observed: Observed, plan: ResolvedPlan) -> Mapping[str, int]:
    """Leader -> replicas: what its OmniStage says, or what this very reconcile is about to write there."""
    wanted = {}
    for leader in plan.pod_groups():
        live = observed.stage_named(stage_name(plan.pipeline, leader))
        request = plan_replica_request(live, plan.replicas.get(leader))
        current = current_replicas(live)
        wanted[leader] = request[0] if request is not None else (current or 0)
    return wanted


def _notes(observed: Observed, plan: ResolvedPlan, rollout: Rollout, writes: tuple[Write, ...]) -> tuple[Note, ...]:
    notes = []
    for old, replicas, _ in rollout.shrink:
        blocker = rollout.blocked.get(old.stage, "")
        message = f"stage {old.stage}: no room for revision {rollout.newest} beside {old.revision} ({blocker}); "
        message += f"the old revision goes down to {replicas} replicas"
        notes.append(Note(Reason.SURGE_BLOCKED, message, warning=True))
    if observed.entry_deployment is None and any(w.live is None for w in writes):
        notes.append(Note(Reason.CREATED, f"making revision {plan.revision} with {len(plan.stages)} stages"))
    elif observed.entry_deployment is not None and observed.entry_deployment.revision != plan.revision:
        old_revision = observed.entry_deployment.revision
        notes.append(Note(Reason.ROLLING_OUT, f"rolling out revision {plan.revision} over {old_revision}"))
    notes.extend(
        Note(Reason.SCALED, f"{w.child.name}: {w.child.body['spec']['replicas']} replicas, as the pipeline asks")
        for w in writes
        if "replicas" in w.child.body.get("spec", {})
        and w.cause.startswith("replicas requested")
        and w.live is not None
    )
    return tuple(notes)
