"""A replica count that somebody sets stays within the pipeline's scaling range."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.stage import OmniStage
from omni_operator.kinds import STAGE
from omni_runtime.errors import FieldError
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Change, Rule


def check(change: Change[OmniStage], context: Context) -> Iterator[FieldError]:
    """Only a count that changes: the range may narrow while a pool is larger, and whoever scales owns the count (T12)."""
    spec, old = change.new.spec, change.old
    count = spec.replicas
    if count is None or (old is not None and old.spec.replicas == count):
        return
    low, high = spec.min_replicas, spec.max_replicas
    towards = f"or change the scaling of stage {spec.stage_name} in pipeline {spec.pipeline_ref.name}"
    if low is not None and count < low:
        yield FieldError("spec.replicas", str(count), f"fewer than scaling.minReplicas {low}", f"use {low}, {towards}")
    if high is not None and count > high:
        yield FieldError("spec.replicas", str(count), f"more than scaling.maxReplicas {high}", f"use {high}, {towards}")


RULE = Rule("ReplicasOutOfBounds", STAGE, check)
