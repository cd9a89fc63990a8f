"""What a profile may say, and this version does not run."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.runtimeprofile import EngineBackend, OmniRuntimeProfile
from omni_operator.kinds import PROFILE
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniRuntimeProfile], context: Context) -> Iterator[Advice]:
    """No error: a profile may be prepared for the next version, and pipelines that use it say so themselves."""
    spec = change.new.spec
    if spec.backend is EngineBackend.VLLM_OMNI:
        yield Advice("spec.backend", "vllm-omni: this version does not run it; pipelines with this profile are refused")


RULE = Rule("UnsupportedRuntime", PROFILE, check)
