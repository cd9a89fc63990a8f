"""Will the pods that have no node find one? The check of admission again, since the world changes afterwards. Pure.

Asked only while something waits: a pipeline whose pods all have nodes is placed, whatever a model of memory says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from omni_crds.v1alpha1.conditions import Reason
from omni_crds.v1alpha1.runtimeprofile import MissingNodesPolicy, OmniRuntimeProfile
from omni_operator.kinds import DEPLOYMENT
from omni_operator.observed import Observed
from omni_operator.placement import (
    Catalogue,
    ClusterView,
    ConstraintKind,
    FeasibleIfNodesAreAdded,
    Infeasible,
    TenantView,
    check_placement,
    stage_paths,
)
from omni_operator.plan.model import Outlook, OutlookKind, Plan
from omni_operator.plan.pods import is_active, is_scheduled
from omni_runtime.deploy.plan import ResolvedPlan

# Nodes are not watched: a pipeline that waits for one looks again after this long.
LOOK_AGAIN_SECONDS = 30.0
_LIMITS = (ConstraintKind.QUOTA, ConstraintKind.TENANT_BUDGET)


def waits_for_places(observed: Observed, plan: Plan) -> bool:
    """Some replica of the newest revision has no node yet."""
    resolved = plan.resolved
    if resolved is None or plan.violations:
        return False
    return any(
        count > sum(is_active(p) and is_scheduled(p) for p in observed.pods_of(leader, resolved.revision))
        for leader, count in plan.wanted.items()
    )


def plan_outlook(
    observed: Observed, plan: Plan, cluster: ClusterView | None, tenant: TenantView | None = None
) -> Outlook | None:
    """What the check says of the counts that are wanted now. None: nothing that a condition should say.

    cluster: None where it is not known. A budget holds in any case: no node that may come changes it.
    """
    resolved = plan.resolved
    if resolved is None or observed.pipeline is None:
        return None
    policy = missing_nodes_policy(resolved, observed.profiles)
    only_budget = cluster is None or policy is MissingNodesPolicy.IGNORE
    if only_budget and tenant is None:
        return None
    view = ClusterView() if cluster is None or only_budget else cluster
    verdict = check_placement(
        resolved,
        replace(view, tenant=tenant, nodes_may_be_added=policy is MissingNodesPolicy.WARN),
        catalogue=Catalogue.of(observed.profiles),
        replicas=plan.wanted,
        paths=stage_paths(observed.pipeline.spec),
    )
    if isinstance(verdict, FeasibleIfNodesAreAdded):
        count = len(verdict.witness.added_nodes)
        message = f"waits for {count} more node{'s' if count > 1 else ''}: {verdict.message}"
        return Outlook(OutlookKind.NEEDS_NODES, Reason.PROGRESSING, message)
    if not isinstance(verdict, Infeasible) or not verdict.proven:
        return None
    kind = verdict.constraint.kind
    if only_budget and kind is not ConstraintKind.TENANT_BUDGET:
        return None
    reason = Reason.QUOTA_EXCEEDED if kind in _LIMITS else Reason.UNSCHEDULABLE
    hold = policy is MissingNodesPolicy.REJECT or kind is ConstraintKind.TENANT_BUDGET
    return Outlook(OutlookKind.INFEASIBLE, reason, verdict.message, hold)


def with_outlook(observed: Observed, plan: Plan, outlook: Outlook | None) -> Plan:
    """The plan with what is expected of it. A pipeline that cannot be placed whole, and of which nothing runs yet, gets
    no pods where its profile says Reject: half of it would only keep devices from others. Nor does one for which its
    tenant has no budget left."""
    if outlook is None:
        return plan
    after = LOOK_AGAIN_SECONDS if plan.requeue_after is None else min(plan.requeue_after, LOOK_AGAIN_SECONDS)
    plan = replace(plan, outlook=outlook, requeue_after=after)
    if not outlook.hold or observed.of_kind(DEPLOYMENT):
        return plan
    return replace(plan, writes=tuple(w for w in plan.writes if w.child.kind is not DEPLOYMENT))


def missing_nodes_policy(
    resolved: ResolvedPlan, profiles: Mapping[str, OmniRuntimeProfile]
) -> MissingNodesPolicy | None:
    """Of several profiles the most patient one: a stage that may wait for nodes makes the pipeline wait."""
    used = [profiles[s.profile].spec.missing_nodes for s in resolved.stages if s.profile in profiles]
    for policy in (MissingNodesPolicy.IGNORE, MissingNodesPolicy.WARN):
        if policy in used:
            return policy
    return MissingNodesPolicy.REJECT if MissingNodesPolicy.REJECT in used else None
