"""The count of a stage that shares another one's pods moves nothing."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.stage import OmniStage
from omni_operator.kinds import STAGE
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniStage], context: Context) -> Iterator[Advice]:
    spec, old = change.new.spec, change.old
    if spec.colocated_with is None or old is None or spec.replicas in (None, old.spec.replicas):
        return
    text = f"this stage runs in the pods of {spec.colocated_with}, whose count decides: scale that one"
    yield Advice("spec.replicas", text)


RULE = Rule("FollowerScaled", STAGE, check)
