"""Scaling a stage by hand stays within the tenant's budget, as creating a pipeline does."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.stage import OmniStage
from omni_operator.kinds import STAGE
from omni_runtime.errors import FieldError
from omni_webhooks.context import PIPELINES, PROFILES, STAGES, TENANTS, Context
from omni_webhooks.rules.rule import Change, Rule


def check(change: Change[OmniStage], context: Context) -> Iterator[FieldError]:
    """Only a count that grows."""
    namespace, spec = change.key[0], change.new.spec
    before = change.old.spec.replicas if change.old else None
    if spec.replicas is None or spec.replicas <= (before or 0):
        return
    tenant, owner = context.tenant_of(namespace), (namespace, spec.pipeline_ref.name)
    pool = next((p for p in context.ledger.pools_of(owner) if p.leader == spec.stage_name), None)
    if tenant is None or pool is None:
        return
    # The pools of the pipeline itself count as well, but not this one as it was.
    current = context.counts.get((*owner, pool.leader), pool.initial)
    for budget in tenant.spec.accelerator_budget or ():
        if budget.class_name != pool.device_class:
            continue
        used = context.in_use(tenant)[pool.device_class] - current * pool.devices
        left = max(0, budget.count - used)
        if spec.replicas * pool.devices > left:
            problem = (
                f"{spec.replicas} x {pool.devices} {pool.device_class}; tenant {tenant.metadata.name} has {left} left"
                f" of {budget.count}"
            )
            fix = f"use {left // pool.devices}, or raise the budget"
            yield FieldError("spec.replicas", str(spec.replicas), problem, fix)


RULE = Rule("ScaleBeyondBudget", STAGE, check, needs=(TENANTS, PIPELINES, STAGES, PROFILES))
