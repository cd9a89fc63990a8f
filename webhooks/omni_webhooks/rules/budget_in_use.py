"""A budget below what the tenant's pipelines use now stops nothing; it refuses the next demand."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator.kinds import TENANT
from omni_webhooks.context import PIPELINES, PROFILES, STAGES, Context
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniTenant], context: Context) -> Iterator[Advice]:
    budget = change.new.spec.accelerator_budget
    used = context.in_use(change.new) if budget else {}
    for i, entry in enumerate(budget or ()):
        now = used.get(entry.class_name, 0)
        if now > entry.count:
            text = (
                f"{entry.count}: pipelines of the tenant use {now} {entry.class_name} now; they go on, and get no more"
            )
            yield Advice(f"spec.acceleratorBudget[{i}].count", text)


RULE = Rule("BudgetInUse", TENANT, check, needs=(PIPELINES, PROFILES, STAGES))
