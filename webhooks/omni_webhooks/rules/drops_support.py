"""A profile change after which running pipelines do not resolve any more."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_operator.kinds import PROFILE
from omni_webhooks.context import PIPELINES, PROFILES, Context, profile_names, resolve_with
from omni_webhooks.rules.rule import Advice, Change, Operation, Rule

MOST_CHECKED = 100  # half a millisecond each
MOST_NAMED = 5


def check(change: Change[OmniRuntimeProfile], context: Context) -> Iterator[Advice]:
    """They keep running as they are; their next change is refused until it fits the profile."""
    name = change.key[1]
    using = [(k, p) for k, p in context.pipelines.items() if name in profile_names(p, context.profiles).values()]
    after = {**context.profiles, name: change.new}
    broken = []
    for key, pipeline in sorted(using, key=lambda entry: entry[0])[:MOST_CHECKED]:
        errors = resolve_with(pipeline, after).errors
        if errors and not context.resolve(pipeline).errors:
            broken.append(f"{key[0]}/{key[1]} ({errors[0]})")
    if broken:
        more = f" and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
        yield Advice("spec", f"pipelines that no longer fit: {'; '.join(broken[:MOST_NAMED])}{more}")


RULE = Rule(
    "ProfileDropsSupport", PROFILE, check, needs=(PIPELINES, PROFILES), operations=frozenset({Operation.UPDATE})
)
