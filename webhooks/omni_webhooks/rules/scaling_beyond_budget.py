"""Scaling that a budget will stop is said before it happens."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_webhooks.context import PIPELINES, PROFILES, STAGES, TENANTS, Context
from omni_webhooks.demand import devices_at_most, devices_at_start
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniPipeline], context: Context) -> Iterator[Advice]:
    plan = context.resolve(change.new).plan
    if plan is None:
        return
    most, start = devices_at_most(plan), devices_at_start(plan)
    if most == start:
        return  # nothing scales: what it starts with is for other rules
    total, budget = sum(most.values()), change.new.spec.budget
    if budget and total > budget.accelerators:
        text = f"at maxReplicas the stages use {total} accelerators; scaling stops at {budget.accelerators}"
        yield Advice("spec.budget.accelerators", text)
    tenant = context.tenant_of(change.key[0])
    if tenant is None or not tenant.spec.accelerator_budget:
        return
    used = context.in_use(tenant, without=change.key)
    for entry in tenant.spec.accelerator_budget:
        left = max(0, entry.count - used[entry.class_name])
        if most.get(entry.class_name, 0) > left:
            text = (
                f"at maxReplicas the stages use {most[entry.class_name]} {entry.class_name};"
                f" tenant {tenant.metadata.name} has {left} left of {entry.count}"
            )
            yield Advice("spec.stages", text)


RULE = Rule("ScalingBeyondBudget", PIPELINE, check, needs=(PROFILES, TENANTS, PIPELINES, STAGES))
