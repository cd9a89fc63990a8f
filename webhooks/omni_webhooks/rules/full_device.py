"""An engine that takes all of a device leaves nothing for the runtime itself."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_webhooks.context import PROFILES, Context
from omni_webhooks.demand import path_of
from omni_webhooks.rules.rule import Advice, Change, Rule

UNWISE_ABOVE = 0.95


def check(change: Change[OmniPipeline], context: Context) -> Iterator[Advice]:
    plan = context.resolve(change.new).plan
    for stage in plan.stages if plan else ():
        if stage.device.resource_name is not None and stage.device.memory_fraction > UNWISE_ABOVE:
            text = f"{stage.device.memory_fraction:g} of the device: drivers and graphs need some of it; 0.9 is usual"
            yield Advice(f"{path_of(change.new, stage.name)}.accelerator.memoryFraction", text)


RULE = Rule("FullDevice", PIPELINE, check, needs=(PROFILES,))
