"""Which revisions run now, and what gives way to what. Pure and stateless: the step is read from what is there.

The newest revision's stages come up beside the old ones; the entry moves over when all of them are live; then the old
ones go. At any time there are at most two revisions: the newest, and one that still answers or drains (T39).

- Surge: as above; the old one waits as long as it takes.
- Recreate: the old stages go first, the new ones come when the old pods are gone.
- Auto: Surge, but a pod group whose new pods find no place takes it from its own old pods, `maxUnavailable` at a time,
  and never the last one of several before a new one answers (T38).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from omni_crds.v1alpha1.pipeline import RolloutStrategy
from omni_operator.names import ENTRY_STAGE, YIELD_ANNOTATION
from omni_operator.observed import Live, Observed
from omni_operator.plan.model import Rollout
from omni_operator.plan.pods import is_active, is_finished, is_ready, is_scheduled, parse_time, unschedulable

# How long new pods may find no place before old ones give way: the node autoscaler gets a chance, a person does not wait.
BLOCKED_GRACE_SECONDS = 15.0
# How long the place that was given must have been free before the last old pod goes, too.
YIELD_GRACE_SECONDS = 60.0


def serving_revision(observed: Observed, newest: str) -> str | None:
    """The revision whose entry is Ready; the newest one where several are."""
    ready = {p.revision for p in observed.pods_of(ENTRY_STAGE) if is_ready(p)}
    if newest in ready:
        return newest
    return min(ready) if ready else None


def revision_to_keep(observed: Observed, newest: str, last_serving: str | None) -> str | None:
    """The one old revision that is still needed: it answers, or answered last and its entry is still there, or drains.

    last_serving: from status. An entry that is unready for a moment in the middle of a rollout must not lose its stages.
    """
    serving = serving_revision(observed, newest)
    if serving is not None and serving != newest:
        return serving
    entries = [p for p in observed.pods_of(ENTRY_STAGE) if p.revision != newest and not is_finished(p)]
    if serving is None and any(p.revision == last_serving for p in entries if not p.deleting):
        return last_serving
    # Requests that the old entry still finishes need the old stages until it is gone (T44).
    draining = sorted({p.revision for p in entries if p.deleting})
    if last_serving in draining:
        return last_serving
    return draining[0] if draining else None


def plan_rollout(
    observed: Observed,
    newest: str,
    wanted: Mapping[str, int],
    *,
    strategy: RolloutStrategy,
    max_unavailable: int,
    last_serving: str | None,
    now: datetime,
) -> Rollout:
    """wanted: leader -> replicas of the newest revision."""
    serving = serving_revision(observed, newest)
    old = tuple(d for d in observed.stage_deployments if d.revision != newest)
    if strategy is RolloutStrategy.RECREATE:
        leftovers = [p for p in observed.pods if p.stage != ENTRY_STAGE and p.revision != newest and not is_finished(p)]
        return Rollout(
            newest=newest,
            serving=serving,
            kept=(newest,),
            groups_to_run=frozenset() if old or leftovers else frozenset(wanted),
            obsolete=old,
        )
    keep = revision_to_keep(observed, newest, last_serving)
    kept = (newest,) if keep is None else (newest, keep)
    obsolete = tuple(d for d in old if d.revision != keep)
    blocked: dict[str, str] = {}
    shrink: list[tuple[Live, int, str]] = []
    waits: list[float] = []
    if strategy is RolloutStrategy.AUTO:
        for deployment in (d for d in old if d.revision == keep and not d.deleting):
            leader = deployment.stage
            reason, wait = _blocked(observed, leader, newest, now)
            if wait is not None:
                waits.append(wait)
            if reason is None:
                continue
            blocked[leader] = reason
            target, note, wait = _yield(observed, deployment, newest, wanted.get(leader, 0), max_unavailable, now)
            if wait is not None:
                waits.append(wait)
            if int(deployment.spec.get("replicas") or 0) > target:
                shrink.append((deployment, target, note))
    return Rollout(
        newest=newest,
        serving=serving,
        kept=kept,
        groups_to_run=frozenset(wanted),
        obsolete=obsolete,
        shrink=tuple(shrink),
        blocked=blocked,
        requeue_after=min(waits) if waits else None,
    )


def _blocked(observed: Observed, leader: str, newest: str, now: datetime) -> tuple[str | None, float | None]:
    """(why the group's new pods find no place, None) or (None, seconds after which to look again)."""
    wait: float | None = None
    for pod in observed.pods_of(leader, newest):
        found = unschedulable(pod)
        if found is None:
            continue
        message, since = found
        age = (now - since).total_seconds() if since else BLOCKED_GRACE_SECONDS
        if age >= BLOCKED_GRACE_SECONDS:
            return message, None
        remaining = BLOCKED_GRACE_SECONDS - age
        wait = remaining if wait is None else min(wait, remaining)
    return None, wait


def _yield(
    observed: Observed, old: Live, newest: str, wanted: int, max_unavailable: int, now: datetime
) -> tuple[int, str, float | None]:
    """(replicas that the old Deployment keeps, note for its annotation, seconds after which to look again)."""
    leader = old.stage
    new_ready = sum(1 for p in observed.pods_of(leader, newest) if is_ready(p))
    new_placed = sum(1 for p in observed.pods_of(leader, newest) if is_active(p) and is_scheduled(p))
    target = max(0, wanted - max(1, max_unavailable) - new_ready)
    if wanted >= 2:
        target = max(1, target)  # the last old one answers until the entry has moved over
    current = int(old.spec.get("replicas") or 0)
    noted_revision, _, noted_time = old.annotations.get(YIELD_ANNOTATION, "").partition("@")
    if target < current:
        return target, f"{newest}@{now.strftime('%Y-%m-%dT%H:%M:%SZ')}", YIELD_GRACE_SECONDS
    if target == 0 or new_placed:
        return min(target, current), "", None
    # Everything that could be given was given and still nothing fits: the last old one goes, too.
    since = parse_time(noted_time) if noted_revision == newest else None
    if since is None:
        return 0, f"{newest}@{now.strftime('%Y-%m-%dT%H:%M:%SZ')}", None
    age = (now - since).total_seconds()
    if age < YIELD_GRACE_SECONDS:
        return min(target, current), "", YIELD_GRACE_SECONDS - age
    return 0, f"{newest}@{now.strftime('%Y-%m-%dT%H:%M:%SZ')}", None
