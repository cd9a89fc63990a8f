"""Namespaces under the restricted Pod Security Standard refuse hostPath volumes."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_operator.kinds import PROFILE
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniRuntimeProfile], context: Context) -> Iterator[Advice]:
    spec = change.new.spec
    for field, volume in (("modelCache", spec.model_cache), ("nodeLocalVolume", spec.node_local_volume)):
        if volume is not None and volume.host_path is not None:
            text = "a hostPath volume is refused in namespaces under the baseline or restricted Pod Security Standard"
            yield Advice(f"spec.{field}.hostPath", text)


RULE = Rule("HostPathVolume", PROFILE, check)
