"""Deleting a profile under running pipelines."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_operator.kinds import PROFILE
from omni_webhooks.context import PIPELINES, PROFILES, Context, profile_names
from omni_webhooks.rules.rule import Advice, Change, Operation, Rule

MOST_NAMED = 5


def check(change: Change[OmniRuntimeProfile], context: Context) -> Iterator[Advice]:
    """No refusal: a deletion never waits for a webhook (T52), and pods keep running from the last good plan."""
    name = change.key[1]
    using = sorted(k for k, p in context.pipelines.items() if name in profile_names(p, context.profiles).values())
    if using:
        named = ", ".join("/".join(key) for key in using[:MOST_NAMED])
        more = f" and {len(using) - MOST_NAMED} more" if len(using) > MOST_NAMED else ""
        yield Advice("", f"used by {named}{more}: they keep running, and cannot change until a profile {name} is back")


RULE = Rule("ProfileInUse", PROFILE, check, needs=(PIPELINES, PROFILES), operations=frozenset({Operation.DELETE}))
