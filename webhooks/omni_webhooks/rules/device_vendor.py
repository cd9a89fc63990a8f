"""A resource name of another vendor than the profile's is most likely a slip."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.runtimeprofile import AcceleratorVendor, OmniRuntimeProfile
from omni_operator.kinds import PROFILE
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Advice, Change, Rule

# Domains under which the vendors' device plugins advertise; others exist (virtual GPUs), so this is no error.
DOMAINS = {
    AcceleratorVendor.NVIDIA: ("nvidia.com",),
    AcceleratorVendor.AMD: ("amd.com",),
    AcceleratorVendor.ASCEND: ("huawei.com",),
    AcceleratorVendor.INTEL: ("gpu.intel.com", "habana.ai"),
    AcceleratorVendor.MOORE_THREADS: ("mthreads.com",),
}


def check(change: Change[OmniRuntimeProfile], context: Context) -> Iterator[Advice]:
    usual = DOMAINS.get(change.new.spec.vendor, ())
    for i, device in enumerate(change.new.spec.device_classes):
        domain = (device.resource_name or "").split("/")[0]
        if usual and domain and domain not in usual:
            text = f"{device.resource_name!r}: devices of {change.new.spec.vendor.value} are usually {' or '.join(usual)}/..."
            yield Advice(f"spec.deviceClasses[{i}].resourceName", text)


RULE = Rule("DeviceVendor", PROFILE, check)
