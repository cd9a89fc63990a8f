"""A drain that waits for nothing cuts answers off."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Advice, Change, Rule

SHORT_SECONDS = 30


def check(change: Change[OmniPipeline], context: Context) -> Iterator[Advice]:
    """A spoken answer takes as long as it is (T44)."""
    drain = change.new.spec.drain
    if drain is not None and drain.timeout_seconds < SHORT_SECONDS:
        text = f"{drain.timeout_seconds} s: rollouts, scale-downs and node drains cut longer answers off; 300 is the default"
        yield Advice("spec.drain.timeoutSeconds", text)


RULE = Rule("CutAnswers", PIPELINE, check)
