"""Namespaces above the privileged Pod Security Standard refuse pods that lock memory for RDMA."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.runtimeprofile import MooncakeProtocol, OmniRuntimeProfile
from omni_operator.kinds import PROFILE
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniRuntimeProfile], context: Context) -> Iterator[Advice]:
    mooncake = change.new.spec.mooncake
    if mooncake is not None and mooncake.protocol is MooncakeProtocol.RDMA:
        text = (
            "RDMA: the connector's container starts as root with the capability IPC_LOCK, which is refused in namespaces "
            "under the baseline or restricted Pod Security Standard"
        )
        yield Advice("spec.mooncake.protocol", text)


RULE = Rule("LockedMemory", PROFILE, check)
