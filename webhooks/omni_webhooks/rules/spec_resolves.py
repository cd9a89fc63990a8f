"""A pipeline that the operator could not plan is refused, with every violation, and not reported later as Stalled."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_runtime.errors import FieldError
from omni_webhooks.context import PROFILES, Context
from omni_webhooks.rules.rule import Change, Rule


def check(change: Change[OmniPipeline], context: Context) -> Iterator[FieldError]:
    """Graph, engines, flags, device classes, parallelism, edges, chunks, arenas, budget: what `resolve` says."""
    yield from context.resolve(change.new).errors


RULE = Rule("InvalidSpec", PIPELINE, check, needs=(PROFILES,))
