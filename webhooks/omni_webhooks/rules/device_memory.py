"""A device without memory fits no stage."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_operator.kinds import PROFILE
from omni_runtime.deploy.quantity import parse_quantity
from omni_runtime.errors import FieldError
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Change, Rule

SMALLEST_BYTES = 2**20


def check(change: Change[OmniRuntimeProfile], context: Context) -> Iterator[FieldError]:
    """`80` is eighty bytes; the unit was forgotten."""
    for i, device in enumerate(change.new.spec.device_classes):
        if parse_quantity(device.memory) < SMALLEST_BYTES:
            problem = "a device of less than one MiB"
            fix = (
                f"use {device.memory}Gi"
                if device.memory.isdigit() and int(device.memory)
                else "use what one device has, such as 80Gi"
            )
            yield FieldError(f"spec.deviceClasses[{i}].memory", device.memory, problem, fix)


RULE = Rule("DeviceMemory", PROFILE, check)
