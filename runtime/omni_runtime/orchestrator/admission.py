"""Who may start now. Pure: reads pools, decides; the loop binds.

In the queue's order per stage: a request that waits for a stage keeps later ones from overtaking it there, but not
those that do not need that stage (text goes on while speech waits for a talker).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from omni_runtime.deploy.plan import EntryPlan, ResolvedPlan
from omni_runtime.errors import QueueFull, StageUnavailable
from omni_runtime.orchestrator.spec import RequestSpec
from omni_runtime.orchestrator.values import RequestId, StageName


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """Limits of one entry."""

    max_queue: int
    max_per_tenant: int | None = None  # running and waiting; None: as many as the queue takes
    max_seconds: float = math.inf  # of a request, whatever its client asks for
    replays: int = 1  # of a request that has emitted nothing, after the loss of a replica
    unavailable_grace_seconds: float = 5.0  # how long a request waits for a stage without any live replica


def rules_of(entry: EntryPlan) -> AdmissionRules:
    return AdmissionRules(
        max_queue=entry.max_queue,
        max_per_tenant=entry.max_per_tenant,
        max_seconds=entry.request_timeout_seconds,
        replays=entry.replays,
    )


class Overloaded(QueueFull):
    """429 with the seconds after which a retry has a chance. limit: queue | tenant | share, the one that was reached."""

    def __init__(self, limit: str, why: str, retry_after_seconds: int, else_do: str = "") -> None:
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds
        super().__init__(f"{why}; retry after {retry_after_seconds} s" + (f", {else_do}" if else_do else ""))


def plan_admissions(
    queue: Iterable[RequestSpec], free: Mapping[StageName, int]
) -> tuple[tuple[RequestId, ...], Mapping[StageName, int]]:
    """Requests that can be bound to a replica of each of their stages now, in order, and how many wait per stage.

    free: places per stage, over all live replicas.
    """
    left = dict(free)
    waiting: dict[StageName, int] = {}
    admitted = []
    for spec in queue:
        short = [s for s in spec.stages if left.get(s, 0) <= 0 or s in waiting]
        if short:
            for stage in short:
                waiting[stage] = waiting.get(stage, 0) + 1
            continue
        for stage in spec.stages:
            left[stage] -= 1
        admitted.append(spec.request)
    return tuple(admitted), waiting


def missing_stages(stages: Iterable[StageName], live: Callable[[StageName], int]) -> tuple[StageName, ...]:
    """Stages without a single live replica."""
    return tuple(s for s in stages if live(s) == 0)


def waking_seconds(plan: ResolvedPlan, stage: StageName) -> float:
    """How long a request waits for a stage that sleeps while idle: its waiting is what wakes it (T34)."""
    return float(plan.stage(stage).startup_timeout_seconds) if plan.may_sleep(stage) else 0.0


def unavailable(
    pipeline: str, missing: tuple[StageName, ...], waited_seconds: float, states: Callable[[StageName], Iterable[str]]
) -> StageUnavailable:
    """states(stage): of its replicas that may not get work."""
    named = ", ".join(f"{stage} ({_counted(states(stage))})" for stage in missing)
    if all("Asleep" in states(stage) for stage in missing):
        do = "wake them up with POST /v1/omni/wakeup"
    else:
        do = f"look at the pods of OmniStage {pipeline}-{missing[0]}, or at /omni/status"
    return StageUnavailable(
        f"pipeline {pipeline} has no live replica of stage {named}; waited {waited_seconds:.1f} s; {do}"
    )


def _counted(states: Iterable[str]) -> str:
    counts = Counter(states)
    return ", ".join(f"{n} {state}" for state, n in sorted(counts.items())) or "none registered"
