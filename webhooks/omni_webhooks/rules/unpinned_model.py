"""Weights that may change between two pods of one pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniPipeline], context: Context) -> Iterator[Advice]:
    model = change.new.spec.model
    if model.uri.startswith("hf://") and model.revision is None:
        text = "the hub's default branch moves: a replica that starts later may load other weights; name a commit"
        yield Advice("spec.model.revision", text)


RULE = Rule("UnpinnedModel", PIPELINE, check)
