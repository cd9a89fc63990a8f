"""Bring one pipeline to its desired state. Reads top to bottom; everything that decides is in plan/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from omni_operator.apply import Fence, KeyRing, apply_plan
from omni_operator.autoscale.loop import Autoscaler
from omni_operator.crd_guard import CrdGuard
from omni_operator.errors import KubeError
from omni_operator.events import EventSink
from omni_operator.fleet import FleetReader
from omni_operator.kube import KubeApi
from omni_operator.observe import observe
from omni_operator.observed import Key
from omni_operator.plan import plan_pipeline
from omni_operator.plan.model import Outcome
from omni_operator.plan.placement import plan_outlook, waits_for_places, with_outlook
from omni_operator.sidecars import SidecarReader
from omni_operator.status import announce, write_status
from omni_operator.tenancy import read_tenant
from omni_operator.ttfp import EntryStatusReader

# A child that is being deleted by somebody: its DELETED event may come from a kind whose watch is cut.
WAITING_SECONDS = 2.0
# What the API server refused may be accepted later (a quota grows, a webhook is fixed) without any event for us.
REFUSED_SECONDS = 60.0

Clock = Callable[[], datetime]


@dataclass(slots=True)
class Cluster:
    """What a reconcile may touch."""

    kube: KubeApi
    fence: Fence
    events: EventSink
    guard: CrdGuard | None = None
    ttfp: EntryStatusReader | None = None
    fleet: FleetReader | None = None
    autoscaler: Autoscaler | None = None
    sidecars: SidecarReader | None = None
    default_profile: str | None = None
    keys: KeyRing = field(default_factory=KeyRing)


@dataclass(frozen=True, slots=True)
class Requeue:
    after: float | None = None

    @classmethod
    def never(cls) -> Requeue:
        """Until the next event or resync."""
        return cls(None)


async def reconcile(key: Key, cluster: Cluster, clock: Clock) -> Requeue:
    """Bring one pipeline to its desired state; safe to run at any time, any number of times.

    Raises KubeError for what passes by itself (the queue backs off), LeadershipLost, CrdOutdated.
    """
    if cluster.guard is not None:
        await cluster.guard.check()
    observed = await observe(key, cluster.kube, cluster.ttfp)
    plan = plan_pipeline(observed, now=clock(), default_profile=cluster.default_profile)
    if cluster.autoscaler is not None:
        observed = replace(observed, scaling=cluster.autoscaler.track(observed, plan.resolved))
    if cluster.sidecars is not None:
        observed = replace(observed, edges=cluster.sidecars.edges(observed, plan.resolved))
    if cluster.fleet is not None and waits_for_places(observed, plan):
        nodes = await cluster.fleet.view(key)
        tenant = await read_tenant(cluster.kube, cluster.fleet, observed, cluster.default_profile)
        plan = with_outlook(observed, plan, plan_outlook(observed, plan, nodes, tenant))
    observed = await announce(observed, plan, cluster.kube, cluster.fence, clock())
    interruption: KubeError | None = None
    try:
        outcome = await apply_plan(observed, plan, cluster.kube, cluster.fence, cluster.keys)
    except KubeError as error:
        # The status still says how far it is; then the queue retries.
        interruption = error
        outcome = Outcome(interrupted=error.message)
    notes = await write_status(observed, plan, outcome, cluster.kube, cluster.fence, clock())
    if observed.pipeline_live is not None:
        await cluster.events.emit(observed.pipeline_live, key.namespace, (*plan.notes, *outcome.notes, *notes))
    if interruption is not None:
        raise interruption
    return Requeue(_earliest(plan.requeue_after, outcome))


def _earliest(planned: float | None, outcome: Outcome) -> float | None:
    delays = [planned, WAITING_SECONDS if outcome.waiting else None, REFUSED_SECONDS if outcome.failures else None]
    known = [d for d in delays if d is not None]
    return min(known) if known else None
