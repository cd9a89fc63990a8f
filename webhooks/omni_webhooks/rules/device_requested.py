"""An accelerator is asked for by its resource name; a CPU has none."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.runtimeprofile import AcceleratorVendor, OmniRuntimeProfile
from omni_operator.kinds import PROFILE
from omni_runtime.errors import FieldError
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Change, Rule


def check(change: Change[OmniRuntimeProfile], context: Context) -> Iterator[FieldError]:
    """Without one a pod lands on any node and finds no device, or finds one that belongs to somebody else."""
    spec = change.new.spec
    for i, device in enumerate(spec.device_classes):
        path = f"spec.deviceClasses[{i}].resourceName"
        if spec.vendor is AcceleratorVendor.CPU:
            if device.resource_name is not None:
                problem = "a profile of vendor cpu asks for no device"
                yield FieldError(path, device.resource_name, problem, "remove it, or set the vendor")
        elif device.resource_name is None:
            problem = f"pods would ask for no {spec.vendor.value} device"
            yield FieldError(
                path, "", problem, "name the resource that `kubectl describe node` lists under Allocatable"
            )


RULE = Rule("DeviceNotRequested", PROFILE, check)
