"""How the edges of a pipeline do, from what the sidecars of its pods have said lately. Pure.

A moment is no news: streams wait for their consumer all the time, for milliseconds. What is said of an edge holds for
all of the last looks, and stays said until none of them shows it (T7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from omni_crds.v1alpha1.conditions import Reason
from omni_crds.v1alpha1.pipeline import ConnectorType
from omni_runtime.deploy.plan import EdgePlan, ResolvedPlan

LOOKS = 4  # at a look every 15 s: a minute

NO_MOONCAKE = "Mooncake's engine does not run in pods of {pods}: TCP instead"
NO_FETCHES = "fetches through Mooncake fail: TCP instead"
WAITING = "streams wait for their consumer"


@dataclass(frozen=True, slots=True)
class SidecarReading:
    """What one sidecar says of its pod. Edges by name (`thinker->talker`)."""

    group: str  # leader of the pod group
    stalled: Mapping[str, int] = field(default_factory=dict)  # streams that wait for their consumer
    carried: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (edge, connector) -> chunks since its start
    fetch_failures: int = 0  # of Mooncake's engine, since its start
    mooncake: bool = False  # its engine runs


Look = Mapping[str, SidecarReading]  # one moment: uid of the pod -> what its sidecar says


@dataclass(frozen=True, slots=True)
class EdgeHealth:
    """text: what is wrong, for a person. in_use: connectors over which chunks have gone from the pods of now."""

    reason: Reason = Reason.REACHABLE
    text: str = ""
    in_use: tuple[ConnectorType, ...] = ()


def judge_edges(
    plan: ResolvedPlan, looks: Sequence[Look], before: Mapping[str, EdgeHealth]
) -> Mapping[str, EdgeHealth]:
    """By name of the edge. looks: the last ones, at most LOOKS, newest last; before: what was said after the last."""
    return {edge.name: _judge(plan, edge, looks, before.get(edge.name, EdgeHealth())) for edge in plan.edges}


def _judge(plan: ResolvedPlan, edge: EdgePlan, looks: Sequence[Look], before: EdgeHealth) -> EdgeHealth:
    newest = looks[-1] if looks else {}
    in_use = _in_use(edge, newest)
    waits = [any(r.stalled.get(edge.name, 0) > 0 for r in look.values()) for look in looks]
    waited = before.reason is Reason.BACKPRESSURED and any(waits)
    if waited or (len(waits) >= LOOKS and all(waits)):
        return EdgeHealth(Reason.BACKPRESSURED, WAITING, in_use)
    if edge.connector == ConnectorType.MOONCAKE:
        ends = sorted({plan.stage(end).pod_group for end in (edge.source, edge.to)})
        without = [g for g in ends if any(r.group == g and not r.mooncake for r in newest.values())]
        if without:
            return EdgeHealth(Reason.DEGRADED, NO_MOONCAKE.format(pods=", ".join(without)), in_use)
        if any(_fetches_failed(uid, looks) for uid, r in newest.items() if r.group in ends):
            return EdgeHealth(Reason.DEGRADED, NO_FETCHES, in_use)
    return EdgeHealth(Reason.REACHABLE, "", in_use)


def _in_use(edge: EdgePlan, look: Look) -> tuple[ConnectorType, ...]:
    over = {c for r in look.values() for (name, c), chunks in r.carried.items() if name == edge.name and chunks > 0}
    return tuple(kind for kind in ConnectorType if kind.value in over)


def _fetches_failed(pod: str, looks: Sequence[Look]) -> bool:
    """Lately. A sidecar that has restarted counts from zero."""
    counts = [look[pod].fetch_failures for look in looks if pod in look]
    return any(later > earlier for earlier, later in pairwise(counts))
