"""A packaged model that this version's images do not have."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_runtime.models.catalogue import PACKAGED
from omni_runtime.topology.registry import one_of
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniPipeline], context: Context) -> Iterator[Advice]:
    """No refusal: an image of one's own may package more."""
    scheme, _, name = change.new.spec.model.uri.partition("://")
    known = [model.name for model in PACKAGED]
    if scheme == "packaged" and name not in known:
        text = f"{name!r}: this version's images do not package it; there is {one_of(name, known)}"
        yield Advice("spec.model.uri", text)


RULE = Rule("UnknownModel", PIPELINE, check)
