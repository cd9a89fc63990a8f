"""A profile that does not exist yet is a warning: Git tools apply, and first dry-run, a set of objects in any order."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_webhooks.context import PROFILES, Context
from omni_webhooks.rules.rule import Advice, Change, Rule


def check(change: Change[OmniPipeline], context: Context) -> Iterator[Advice]:
    """The pipeline waits for the profile and goes on by itself; refusing it would keep a set from ever being applied."""
    for error in context.resolve(change.new).missing:
        subject = f"{error.value!r}: " if error.value else ""
        yield Advice(
            error.path, f"{subject}{error.problem}; {error.fix}; until then nothing of this pipeline is started"
        )


RULE = Rule("ProfileMissing", PIPELINE, check, needs=(PROFILES,))
