"""A stage pool of which no pipeline knows gets no pods."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.stage import OmniStage
from omni_operator.kinds import STAGE
from omni_webhooks.context import PIPELINES, PROFILES, Context
from omni_webhooks.rules.rule import Advice, Change, Operation, Rule


def check(change: Change[OmniStage], context: Context) -> Iterator[Advice]:
    spec = change.new.spec
    pipeline = context.pipelines.get((change.key[0], spec.pipeline_ref.name))
    if pipeline is None:
        yield Advice("spec.pipelineRef.name", f"there is no pipeline {spec.pipeline_ref.name} in this namespace")
        return
    plan = context.resolve(pipeline).plan
    if plan is not None and spec.stage_name not in (stage.name for stage in plan.stages):
        known = ", ".join(stage.name for stage in plan.stages)
        yield Advice(
            "spec.stageName", f"pipeline {spec.pipeline_ref.name} has no stage {spec.stage_name}; it has {known}"
        )


RULE = Rule("UnknownStage", STAGE, check, needs=(PIPELINES, PROFILES), operations=frozenset({Operation.CREATE}))
