"""A profile of another vendor is another profile."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_operator.kinds import PROFILE
from omni_runtime.errors import FieldError
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Change, Rule


def check(change: Change[OmniRuntimeProfile], context: Context) -> Iterator[FieldError]:
    """Image, resource names, labels and environment all change with the vendor; pipelines would be replaced wholesale."""
    old, vendor = change.old, change.new.spec.vendor
    if old is not None and old.spec.vendor is not vendor:
        problem = f"the vendor cannot change; it is {old.spec.vendor.value}"
        yield FieldError(
            "spec.vendor", vendor.value, problem, "create another OmniRuntimeProfile, and name it in pipelines"
        )


RULE = Rule("VendorFixed", PROFILE, check)
