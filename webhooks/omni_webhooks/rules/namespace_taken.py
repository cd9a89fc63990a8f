"""A namespace belongs to one tenant: a budget that two could charge is none."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator.kinds import TENANT
from omni_runtime.errors import FieldError
from omni_webhooks.context import TENANTS, Context
from omni_webhooks.rules.rule import Change, Rule


def check(change: Change[OmniTenant], context: Context) -> Iterator[FieldError]:
    owners = {
        namespace: name
        for name, tenant in context.tenants.items()
        if name != change.key[1]
        for namespace in tenant.spec.namespaces
    }
    for i, namespace in enumerate(change.new.spec.namespaces):
        if namespace in owners:
            problem = f"tenant {owners[namespace]} has this namespace"
            yield FieldError(f"spec.namespaces[{i}]", namespace, problem, "remove it here, or first there")


RULE = Rule("NamespaceTaken", TENANT, check, needs=(TENANTS,))
