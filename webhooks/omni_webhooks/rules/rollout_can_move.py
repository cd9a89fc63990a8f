"""A rollout that stops first, and may stop nothing."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline, RolloutStrategy
from omni_operator.kinds import PIPELINE
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniPipeline], context: Context) -> Iterator[Advice]:
    rollout = change.new.spec.rollout
    if rollout and rollout.strategy is RolloutStrategy.RECREATE and rollout.max_unavailable == 0:
        text = "0 with strategy Recreate: a rollout stops one replica at a time all the same; use Surge to lose none"
        yield Advice("spec.rollout.maxUnavailable", text)


RULE = Rule("RolloutContradiction", PIPELINE, check)
