"""The children that a pipeline should have, in the order in which they are made; and those that should go. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from omni_operator.kinds import CONFIG_MAP, DEPLOYMENT
from omni_operator.names import (
    MANAGER,
    REPLICAS_MANAGER,
    ROLLOUT_MANAGER,
    YIELD_ANNOTATION,
    stage_name,
)
from omni_operator.observed import Live, Observed
from omni_operator.plan.diff import difference
from omni_operator.plan.model import Delete, Rollout, Write
from omni_operator.plan.replicas import plan_replica_request
from omni_operator.plan.spec import stored_plan
from omni_operator.resources.child import Child, Scope
from omni_operator.resources.config import build_plan_config_map, build_service_account
from omni_operator.resources.deployment import build_entry_deployment, build_stage_deployment
from omni_operator.resources.disruption import build_entry_budget, build_stage_budget
from omni_operator.resources.network_policy import build_entry_policy, build_stage_policy
from omni_operator.resources.omnistage import build_omnistage, build_replica_request
from omni_operator.resources.service import build_api_service, build_entry_control_service, build_stage_service
from omni_runtime.deploy.plan import ResolvedPlan


def plan_writes(
    observed: Observed, resolved: ResolvedPlan, rollout: Rollout, wanted: Mapping[str, int]
) -> tuple[Write, ...]:
    """Only what differs from what is there; an empty tuple is the normal answer (T7)."""
    scope = Scope(resolved.pipeline, observed.key.namespace)
    writes: list[Write] = []
    for child in _pipeline_children(scope, resolved):
        writes += _write(observed, child)
    for child in _omnistages(scope, resolved):
        writes += _write(observed, child)
    writes += _replica_writes(observed, scope, resolved)
    for child in _stage_children(observed, scope, resolved, rollout):
        writes += _write(observed, child)
    for child in _deployments(observed, scope, resolved, rollout, wanted):
        writes += _write(observed, child)
    writes += [_shrink(observed, *entry) for entry in rollout.shrink]
    return tuple(writes)


def plan_deletes(observed: Observed, resolved: ResolvedPlan, rollout: Rollout) -> tuple[Delete, ...]:
    """Children of ours that neither the newest nor a kept revision needs. Only what our uid controls is ever looked at."""
    scope = Scope(resolved.pipeline, observed.key.namespace)
    stages = {s.name for s in resolved.stages} | _stages_of_kept_revisions(observed, rollout)
    named = {(c.kind, c.name) for c in _pipeline_children(scope, resolved)}
    obsolete = {d.uid for d in rollout.obsolete}
    deletes: list[Delete] = []
    for live in observed.children:
        if live.deleting:
            continue
        if live.kind is CONFIG_MAP:
            gone = live.revision not in rollout.kept
        elif live.kind is DEPLOYMENT:
            gone = live.uid in obsolete
        elif live.stage and (live.kind, live.name) not in named:
            gone = live.stage not in stages
        else:
            gone = (live.kind, live.name) not in named
        if gone:
            deletes.append(Delete(live, "no revision that runs needs it"))
    deletes += _superfluous_group_objects(observed, resolved, rollout, deletes)
    return tuple(deletes)


def _superfluous_group_objects(
    observed: Observed, resolved: ResolvedPlan, rollout: Rollout, already: Sequence[Delete]
) -> Iterator[Delete]:
    """Budget and policy of a stage that has joined another's pods: no pod carries its label any more."""
    leaders = set(resolved.pod_groups()) | {d.stage for d in observed.stage_deployments if d.revision in rollout.kept}
    gone = {d.live.uid for d in already}
    for live in observed.children:
        if live.kind.plural not in ("poddisruptionbudgets", "networkpolicies") or live.deleting or live.uid in gone:
            continue
        if live.stage in {s.name for s in resolved.stages} and live.stage not in leaders:
            yield Delete(live, "the stage shares the pods of another")


def _write(observed: Observed, child: Child) -> Iterator[Write]:
    live = observed.child(child.kind, child.name)
    if child.owner_stage is not None:
        owner = observed.stage_named(child.owner_stage)
        if owner is not None and owner.live.deleting:
            return  # its children go with it; it is made again when it is gone (T51)
    if live is None:
        yield Write(child, MANAGER, "missing", None)
    elif not live.deleting:
        cause = difference(child, live)
        if cause is not None:
            yield Write(child, MANAGER, cause, live)


def _pipeline_children(scope: Scope, plan: ResolvedPlan) -> Iterator[Child]:
    """Owned by the pipeline, except the entry's Deployment."""
    yield build_service_account(scope)
    yield build_plan_config_map(scope, plan)
    yield build_api_service(scope, plan.entry.port)
    yield build_entry_control_service(scope)
    yield build_entry_policy(scope)
    yield build_entry_budget(scope)


def _omnistages(scope: Scope, plan: ResolvedPlan) -> Iterator[Child]:
    for group in plan.pod_groups().values():
        for stage in group:
            yield build_omnistage(scope, group, stage, plan.replicas.get(stage.name))


def _replica_writes(observed: Observed, scope: Scope, plan: ResolvedPlan) -> Iterator[Write]:
    for stage in plan.stages:
        live = observed.stage_named(stage_name(scope.pipeline, stage.name))
        if live is not None and live.live.deleting:
            continue
        request = plan_replica_request(live, plan.replicas.get(stage.name))
        if request is not None:
            count, asked = request
            child = build_replica_request(scope, stage.name, count, asked)
            yield Write(child, REPLICAS_MANAGER, f"replicas requested: {asked}", live.live if live else None)


def _stage_children(observed: Observed, scope: Scope, plan: ResolvedPlan, rollout: Rollout) -> Iterator[Child]:
    for leader, group in plan.pod_groups().items():
        for position, stage in enumerate(group):
            yield build_stage_service(scope, stage.name, leader, position)
        consumers = _consumers(observed, plan, rollout, leader)
        yield build_stage_policy(
            scope, leader, {to for to, _ in consumers}, {to for to, c in consumers if c == "Mooncake"}
        )
        yield build_stage_budget(scope, leader)


def _consumers(observed: Observed, plan: ResolvedPlan, rollout: Rollout, leader: str) -> set[tuple[str, str]]:
    """(leader, connector) of pods that read from this group's pods, in the newest plan or in one that is still kept."""
    kept = [stored_plan(observed, revision) for revision in rollout.kept if revision != plan.revision]
    found: set[tuple[str, str]] = set()
    for each in (plan, *(p for p in kept if p is not None)):
        groups = {s.name: s.pod_group for s in each.stages}
        edges = [e for e in each.edges if groups[e.source] == leader and groups[e.to] != leader]
        found |= {(groups[e.to], e.connector) for e in edges}
    return found


def _deployments(
    observed: Observed, scope: Scope, plan: ResolvedPlan, rollout: Rollout, wanted: Mapping[str, int]
) -> Iterator[Child]:
    existing = {d.stage for d in observed.stage_deployments if d.revision == plan.revision}
    for leader, group in plan.pod_groups().items():
        if leader in rollout.groups_to_run | existing:
            yield build_stage_deployment(scope, plan, group, wanted[leader])
    yield build_entry_deployment(scope, plan)


def _shrink(observed: Observed, old: Live, replicas: int, note: str) -> Write:
    """Only the count of an old Deployment: its template was made from a plan that is not at hand, and must not change."""
    body = {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "metadata": {
            "name": old.name,
            "namespace": observed.key.namespace,
            "annotations": {YIELD_ANNOTATION: note},
        },
        "spec": {"replicas": replicas},
    }
    return Write(Child(DEPLOYMENT, old.name, body), ROLLOUT_MANAGER, "gives way to the newest revision", old)


def _stages_of_kept_revisions(observed: Observed, rollout: Rollout) -> set[str]:
    """Stages that a kept revision uses. Where its plan cannot be read, at least those whose pods exist."""
    found = {d.stage for d in observed.stage_deployments if d.revision in rollout.kept}
    for revision in rollout.kept:
        plan = stored_plan(observed, revision)
        if plan is not None:
            found |= {s.name for s in plan.stages}
    return found
