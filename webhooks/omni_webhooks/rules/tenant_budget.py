"""The devices that a tenant's pipelines start with stay within its budget."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_operator.placement.budgets import exceeds
from omni_runtime.errors import FieldError
from omni_webhooks.context import PIPELINES, PROFILES, STAGES, TENANTS, Context
from omni_webhooks.demand import devices_at_start, stage_path
from omni_webhooks.rules.rule import Change, Rule


def check(change: Change[OmniPipeline], context: Context) -> Iterator[FieldError]:
    """An update that asks for no more than before passes, whatever became of the budget meanwhile."""
    tenant = context.tenant_of(change.key[0])
    plan = context.resolve(change.new).plan
    if tenant is None or plan is None or not tenant.spec.accelerator_budget:
        return
    wanted = devices_at_start(plan)
    before = context.resolve(change.old).plan if change.old else None
    had = devices_at_start(before) if before else {}
    used = context.in_use(tenant, without=change.key)
    for budget in tenant.spec.accelerator_budget:
        count, name = wanted.get(budget.class_name, 0), budget.class_name
        left = max(0, budget.count - used[name])
        if count > left and count > had.get(name, 0):
            problem = exceeds(tenant.metadata.name, name, count, budget.count, used[name])
            fix = (
                f"lower replicas or accelerator.count to {left} devices in sum"
                if left
                else "free devices of the tenant"
            )
            yield FieldError(stage_path(change.new, plan, name), str(count), problem, f"{fix}, or raise the budget")


RULE = Rule("TenantBudgetExceeded", PIPELINE, check, needs=(PROFILES, TENANTS, PIPELINES, STAGES))
