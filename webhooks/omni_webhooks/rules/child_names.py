"""Two pipelines of a namespace whose children would have the same name cannot both run (T5)."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_runtime.errors import FieldError
from omni_webhooks.context import PIPELINES, PROFILES, Context
from omni_webhooks.ledger import child_names
from omni_webhooks.rules.rule import Change, Rule


def check(change: Change[OmniPipeline], context: Context) -> Iterator[FieldError]:
    """Pipeline `a` with stage `b-c`, and pipeline `a-b` with stage `c`, both need a Service `a-b-c`."""
    plan = context.resolve(change.new).plan
    if plan is None:
        return
    namespace, name = change.key
    for child in sorted(child_names(name, (stage.name for stage in plan.stages))):
        for _, other in sorted(context.ledger.owners(namespace, child) - {change.key}):
            problem = f"pipeline {other} of this namespace has a child named {child}, which this one needs, too"
            yield FieldError("metadata.name", name, problem, "give one of the two another name")
            return


RULE = Rule("NameConflict", PIPELINE, check, needs=(PIPELINES, PROFILES))
