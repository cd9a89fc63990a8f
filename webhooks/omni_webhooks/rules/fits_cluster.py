"""A pipeline for which the nodes have no room would be Pending for hours; it is said now, with what would help."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_crds.v1alpha1.runtimeprofile import MissingNodesPolicy
from omni_operator.kinds import PIPELINE
from omni_operator.placement import (
    ConstraintKind,
    FeasibleIfNodesAreAdded,
    Infeasible,
    plan_demand,
)
from omni_operator.plan.placement import missing_nodes_policy
from omni_runtime.deploy.plan import ResolvedPlan
from omni_webhooks.context import NODES, PODS, PROFILES, QUOTAS, STAGES, Context
from omni_webhooks.rules.rule import Advice, Change, Finding, Rule

# Said by DoesNotFitDevice and TenantBudgetExceeded, which need no nodes.
SAID_ELSEWHERE = frozenset(
    {
        ConstraintKind.DEVICE_MEMORY,
        ConstraintKind.SHARED_DEVICE,
        ConstraintKind.INCOMPATIBLE,
        ConstraintKind.TENANT_BUDGET,
    }
)


def check(change: Change[OmniPipeline], context: Context) -> Iterator[Finding]:
    """An update that asks for no more than what was accepted before passes: its pods are already there."""
    plan = context.resolve(change.new).plan
    before = context.resolve(change.old).plan if change.old else None
    if plan is None or (before is not None and asks_no_more(plan, before)):
        return
    policy = missing_nodes_policy(plan, context.profiles)
    if policy is MissingNodesPolicy.IGNORE or not context.nodes_are_known:
        return
    if isinstance(context.fits_devices(change.new), Infeasible):
        return  # on no node of any cluster, as another rule says
    may_grow = policy is MissingNodesPolicy.WARN
    verdict = context.fits_cluster(change.new, change.key, nodes_may_be_added=may_grow)
    if isinstance(verdict, FeasibleIfNodesAreAdded):
        yield Advice("spec.stages", f"pods wait until nodes are added: {verdict.message}")
    if not isinstance(verdict, Infeasible) or verdict.constraint.kind in SAID_ELSEWHERE:
        return
    for error in verdict.errors:
        if not verdict.proven:
            yield Advice(error.path, f"may not fit: {error.problem}; {error.fix}")
        elif may_grow:
            yield Advice(error.path, f"does not fit now: {error.problem}; {error.fix}")
        else:
            yield error


def asks_no_more(new: ResolvedPlan, old: ResolvedPlan) -> bool:
    """Every pod group may use the nodes that it used before, and asks them for no more."""
    before = {demand.group: demand for demand in plan_demand(old, {}, {})}
    return all(
        (was := before.get(demand.group)) is not None
        and demand.replicas <= was.replicas
        and all(amount <= was.requests.get(name, 0) for name, amount in demand.requests.items())
        and (demand.node_selector, demand.tolerations) == (was.node_selector, was.tolerations)
        for demand in plan_demand(new, {}, {})
    )


RULE = Rule("Infeasible", PIPELINE, check, needs=(PROFILES, NODES, PODS, QUOTAS, STAGES))
