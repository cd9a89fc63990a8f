"""What the orchestrator knows about its pools, as values: readiness, /omni/status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.orchestrator.pool import ReplicaState, StagePool
from omni_runtime.orchestrator.values import Instant


class ReplicaStatus(msgspec.Struct, frozen=True, rename="camel"):
    replica: str
    state: str
    bound: int
    capacity: int
    waiting: int
    served: int
    detail: str = ""


class StageStatus(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    live_replicas: int
    waiting: int  # requests in the entry's queue that need this stage
    replicas: tuple[ReplicaStatus, ...]
    voices: tuple[str, ...] = ()  # of its live replicas


class OrchestratorStatus(msgspec.Struct, frozen=True, rename="camel"):
    pipeline: str
    revision: str
    ready: bool
    stages: tuple[StageStatus, ...]
    missing: tuple[str, ...]  # stages without a live replica that may not sleep (T69)
    running: int
    waiting: int
    draining: bool
    paused: bool = False  # nothing is admitted; what runs goes on
    ttfp_milliseconds_p95: float | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    running: int
    waiting: int
    waiting_by_stage: Mapping[str, int]
    draining: bool
    paused: bool


def observe_status(
    plan: ResolvedPlan, pools: Mapping[str, StagePool], counts: Counts, ttfp_p95_ms: float | None, now: Instant
) -> OrchestratorStatus:
    stages = tuple(_stage_status(pools[s.name], counts.waiting_by_stage.get(s.name, 0), now) for s in plan.stages)
    # A stage that sleeps while nobody needs it is not missing: the entry takes requests for it, and they wake it.
    missing = tuple(s.name for s in stages if s.live_replicas == 0 and not plan.may_sleep(s.name))
    return OrchestratorStatus(
        pipeline=plan.pipeline,
        revision=plan.revision,
        ready=not missing and not counts.draining,
        stages=stages,
        missing=missing,
        running=counts.running,
        waiting=counts.waiting,
        draining=counts.draining,
        paused=counts.paused,
        ttfp_milliseconds_p95=ttfp_p95_ms,
    )


def _stage_status(pool: StagePool, waiting: int, now: Instant) -> StageStatus:
    replicas = tuple(
        ReplicaStatus(
            replica=r.id,
            state=pool.state_of(r, now).value,
            bound=len(r.bound),
            capacity=r.hello.capacity,
            waiting=r.load.waiting,
            served=r.served,
            detail=r.unhealthy,
        )
        for r in pool.members
    )
    live = sum(r.state == ReplicaState.LIVE.value for r in replicas)
    return StageStatus(pool.stage, live, waiting, replicas, _voices(pool, now))


def _voices(pool: StagePool, now: Instant) -> tuple[str, ...]:
    live = (r for r in pool.members if pool.state_of(r, now) is ReplicaState.LIVE)
    return tuple(sorted({voice for r in live for voice in r.hello.voices}))
