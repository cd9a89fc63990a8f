"""A stage that may sleep makes somebody wait until its model is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniPipeline], context: Context) -> Iterator[Advice]:
    for i, stage in enumerate(change.new.spec.stages or ()):
        text = "requests that need this stage wait until a model is loaded"
        if stage.scaling is not None and stage.scaling.min_replicas == 0:
            yield Advice(f"spec.stages[{i}].scaling.minReplicas", f"0: after a sleep, {text}")
        elif stage.replicas == 0:
            yield Advice(f"spec.stages[{i}].replicas", "0: the outputs of this stage are not served")


RULE = Rule("SleepingStage", PIPELINE, check)
