"""A stage that does not fit the devices that it asks for never starts, whatever nodes there are (T71)."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_operator.placement import Infeasible
from omni_webhooks.context import PROFILES, Context
from omni_webhooks.rules.rule import Advice, Change, Finding, Rule


def check(change: Change[OmniPipeline], context: Context) -> Iterator[Finding]:
    """Weights, KV cache and workspace against the device's memory; dtypes, heads, flags, ports."""
    verdict = context.fits_devices(change.new)
    if verdict is None:
        return
    if isinstance(verdict, Infeasible):
        yield from verdict.errors
    for warning in verdict.warnings:
        yield Advice(warning.path, warning.message)


RULE = Rule("DoesNotFitDevice", PIPELINE, check, needs=(PROFILES,))
