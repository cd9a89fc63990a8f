"""A tenant uses the runtime profiles that the platform team allows it."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_runtime.errors import FieldError
from omni_webhooks.context import PROFILES, TENANTS, Context, profile_names
from omni_webhooks.rules.rule import Change, Rule


def check(change: Change[OmniPipeline], context: Context) -> Iterator[FieldError]:
    tenant = context.tenant_of(change.key[0])
    if tenant is None or tenant.spec.allowed_profiles is None:
        return
    allowed = sorted(tenant.spec.allowed_profiles)
    for path, name in profile_names(change.new, context.profiles).items():
        if name not in allowed:
            yield FieldError(
                path=path,
                value=name,
                problem=f"tenant {tenant.metadata.name} may not use this runtime profile",
                fix=f"use {' or '.join(allowed)}" if allowed else "ask the platform team for a profile",
            )


RULE = Rule("ProfileNotAllowed", PIPELINE, check, needs=(PROFILES, TENANTS))
