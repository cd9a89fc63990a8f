"""Names in a tenant that nothing has: most likely slips, which allow or limit nothing."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator.kinds import TENANT
from omni_runtime.topology.registry import one_of
from omni_webhooks.context import PROFILES, Context
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniTenant], context: Context) -> Iterator[Advice]:
    """No error: tenants and profiles may come in any order."""
    spec = change.new.spec
    for i, name in enumerate(spec.allowed_profiles or ()):
        if name not in context.profiles:
            text = f"{name!r}: no OmniRuntimeProfile has this name; there is {one_of(name, context.profiles)}"
            yield Advice(f"spec.allowedProfiles[{i}]", text)
    classes = {c.name for p in context.profiles.values() for c in p.spec.device_classes}
    for i, budget in enumerate(spec.accelerator_budget or ()):
        if budget.class_name not in classes:
            text = f"{budget.class_name!r}: no runtime profile has this device class; there is {one_of(budget.class_name, sorted(classes))}"
            yield Advice(f"spec.acceleratorBudget[{i}].class", text)


RULE = Rule("UnknownReference", TENANT, check, needs=(PROFILES,))
