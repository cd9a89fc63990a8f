"""The autoscaler at work: scrape, decide, write `/scale`, say why. One step per pipeline and period; decides nothing.

It sees a pipeline through the eyes of the last reconcile (`track`), so that it reads nothing from the API server, and
it writes only what decide() changed: an idle pipeline costs no request there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omni_crds.v1alpha1.conditions import Reason, truncate
from omni_crds.v1alpha1.learned import LearnedCapacity
from omni_crds.v1alpha1.pipeline import ScalingDecision, ScalingTarget
from omni_operator import logs, metrics
from omni_operator.autoscale.decide import decide
from omni_operator.autoscale.memory import is_due, restored, saved
from omni_operator.autoscale.prometheus import PrometheusReader
from omni_operator.autoscale.record import Record, append
from omni_operator.autoscale.scrape import Scraper
from omni_operator.autoscale.snapshot import Scrape, window_of
from omni_operator.autoscale.surroundings import Surroundings
from omni_operator.autoscale.target import (
    SECOND_OWNER_SECONDS,
    Owner,
    deletion_costs,
    entry_target,
    fleet_of,
    other_owners,
    pod_times,
    prometheus_of,
    spec_of,
    stage_targets,
)
from omni_operator.autoscale.types import Decision, Limits, Spec, StageDecision, StageFleet, Tuning, Window
from omni_operator.autoscale.view import State
from omni_operator.errors import KubeError
from omni_operator.events import EventSink
from omni_operator.fleet import FleetReader
from omni_operator.kinds import POD, STAGE
from omni_operator.kube import KubeApi
from omni_operator.names import AUTOSCALER_MANAGER, DELETION_COST_ANNOTATION, stage_name
from omni_operator.observed import Key, Observed, Scaling
from omni_operator.plan.model import Note
from omni_operator.plan.status import parse_status
from omni_runtime.deploy.plan import ResolvedPlan

PERIOD_SECONDS = 15.0
REMEMBERED = 10  # decisions in the status
IN_FLIGHT = 16
SCRAPE_DEADLINE_SECONDS = 10.0

_REASONS = {
    "MetricsStale": Reason.METRICS_STALE,
    "QueueStuck": Reason.QUEUE_STUCK,
    "SecondOwner": Reason.SECOND_OWNER,
    "Limited": Reason.SCALING_LIMITED,
}


@dataclass(slots=True)
class _Tracked:
    observed: Observed
    plan: ResolvedPlan
    spec: Spec
    state: State = field(default_factory=State)
    last: Scrape | None = None
    pods: frozenset[str] = frozenset()
    others: dict[Owner, datetime] = field(default_factory=dict)  # since when each is known
    decisions: deque[ScalingDecision] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    shown: str = ""  # the reason that the status has
    scaling: Scaling | None = None
    learned: LearnedCapacity | None = None  # as the status has it
    learned_at: float = 0.0
    before: object = None  # what an operator before this one has learned, as it was found
    restored: bool = False


class Autoscaler:
    """clock: wall-clock time in UTC. record: a folder for windows that `omni replay` reads; None: nothing is kept.

    fleet: where nodes, quotas and tenants are read; None: they limit nothing.
    """

    def __init__(
        self,
        kube: KubeApi,
        fence: Callable[[], None],
        events: EventSink,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        scraper: Scraper | None = None,
        record: Path | None = None,
        fleet: FleetReader | None = None,
        tuning: Tuning | None = None,
        period_seconds: float = PERIOD_SECONDS,
    ) -> None:
        self._kube, self._fence, self._events = kube, fence, events
        self._clock = clock
        self._scraper = scraper or Scraper()
        self._prometheus = PrometheusReader()
        self._record = record
        self._surroundings = Surroundings(fleet)
        self._tuning, self._period_seconds = tuning or Tuning(), period_seconds
        self._tracked: dict[Key, _Tracked] = {}

    def track(self, observed: Observed, plan: ResolvedPlan | None) -> Scaling | None:
        """What a reconcile saw. Returns what the status should say; None: nothing of it is scaled here."""
        spec = spec_of(observed, plan) if plan is not None and observed.pipeline_live is not None else None
        if spec is None or plan is None:
            self._tracked.pop(observed.key, None)
            self._surroundings.forget(observed.key)
            return None
        spec = replace(spec, tuning=self._tuning)
        known = self._tracked.get(observed.key)
        if known is None or [s.name for s in known.spec.stages] != [s.name for s in spec.stages]:
            known = self._tracked[observed.key] = _Tracked(observed, plan, spec)
            # What an operator before this one has said still stands, and is not said again.
            before = parse_status(observed.pipeline_live.status) if observed.pipeline_live is not None else None
            if before is not None:
                known.decisions.extend(before.decisions or ())
                known.learned = before.learned
            known.shown = known.decisions[0].reason if known.decisions else ""
            known.before, known.learned_at = _learned_before(observed), self._clock().timestamp()
        known.observed, known.plan, known.spec = observed, plan, spec
        if known.scaling is None or known.scaling.ready:
            known.scaling = Scaling(tuple(known.decisions), True, Reason.AUTOSCALING, _range(spec), known.learned)
        return known.scaling

    async def run_forever(self, enqueue: Callable[[Key], None]) -> None:
        """Beside the workers, until cancelled. A pipeline that fails does not hold the others up."""
        while True:
            await asyncio.sleep(self._period_seconds)
            for key in await self.step_all():
                enqueue(key)

    async def step_all(self) -> tuple[Key, ...]:
        """One step of every pipeline. Returns those whose status should say something else."""
        places = asyncio.Semaphore(IN_FLIGHT)

        async def one(key: Key) -> Key | None:
            async with places:
                try:
                    return key if await self.step(key) else None
                except KubeError as error:
                    logs.warning("autoscaler.write_failed", pipeline=str(key), error=error.message)
                except Exception:  # noqa: BLE001 - one pipeline must not stop the others from being scaled
                    logs.error("autoscaler.failed", exc_info=True, pipeline=str(key))
                return None

        done = await asyncio.gather(*(one(key) for key in tuple(self._tracked)))
        await self._surroundings.share_out()
        return tuple(key for key in done if key is not None)

    async def close(self) -> None:
        await self._scraper.close()
        await self._prometheus.close()

    async def step(self, key: Key) -> bool:
        """Whether the status of this pipeline should say something else now."""
        tracked = self._tracked.get(key)
        if tracked is None:
            return False
        now = self._clock()
        scrape = await self._scrape(tracked, now)
        if self._tracked.get(key) is not tracked:
            return False  # gone, or another pipeline of the same name, while we asked
        if tracked.last is None and not scrape.blank:
            tracked.last = scrape
            return False  # rates need two scrapes: the first one is no news
        pods = pod_times(tracked.observed, tracked.spec)
        names = frozenset(p.name for p in pods)
        fresh = names - tracked.pods if tracked.pods else frozenset()
        window = window_of(tracked.spec, tracked.last, scrape, pods, now.timestamp(), fresh)
        tracked.last, tracked.pods = scrape, names
        fleet = fleet_of(tracked.observed, tracked.spec)
        decision = await self._decide(tracked, window, fleet, now.timestamp())
        if self._tracked.get(key) is not tracked:
            return False
        _measure(key, decision, window)
        owner = _lately(tracked, now)
        if owner is not None:
            said = f"{owner.manager} has set the replicas of {owner.stage}: it is left alone; set scaling.mode External to keep it so"
            news = await self._say(key, tracked, decision, "SecondOwner", said, ready=False, changed=False)
        else:
            for stage in decision.changes:
                await self._write(tracked, stage)
            news = await self._say(
                key,
                tracked,
                decision,
                decision.reason,
                decision.message,
                ready=decision.ready,
                changed=bool(decision.changes),
            )
        return _learned(tracked, now, written_anyway=news) or news

    async def _decide(self, tracked: _Tracked, window: Window, fleet: dict[str, StageFleet], now: float) -> Decision:
        """First what the pipeline would have if nothing but its budget held it; nodes and quotas are read only where
        that is more than it has."""
        key, spec, limits = tracked.observed.key, tracked.spec, Limits()
        start = None if tracked.restored else _restore(tracked, now)
        decision, state = decide(spec, window, fleet, limits, tracked.state, now)
        room = await self._surroundings.room(tracked.observed, tracked.plan, spec, fleet, decision)
        if room is not None:
            spec, limits = room.within(spec), room.limits
            wished = decision
            decision, state = decide(spec, window, fleet, limits, tracked.state, now)
            self._surroundings.tell(key, wished, decision)
        tracked.state = state
        if self._record is not None:
            append(self._record, key, Record(spec, window, tuple(fleet.values()), limits, now, start))
        return decision

    async def _scrape(self, tracked: _Tracked, now: datetime) -> Scrape:
        try:
            async with asyncio.timeout(SCRAPE_DEADLINE_SECONDS):
                observed, plan = tracked.observed, tracked.plan
                entry, pods = entry_target(observed), stage_targets(observed, plan)
                url = prometheus_of(observed, plan)
                if url is None:
                    return await self._scraper.scrape(entry, pods, now.timestamp())
                return await self._prometheus.scrape(url, observed.key.namespace, entry, pods, now.timestamp())
        except TimeoutError:
            return Scrape(now.timestamp())

    async def _write(self, tracked: _Tracked, decided: StageDecision) -> None:
        """Bound to the version that the decision saw: whoever wrote meanwhile wins, and is seen by the next step."""
        key, stage = tracked.observed.key, decided.name
        live = tracked.observed.stage_named(stage_name(key.name, stage))
        if live is None or live.live.deleting:
            return
        if decided.target < decided.current:
            await self._mark(tracked, decided)
        self._fence()
        await self._kube.scale(
            STAGE,
            key.namespace,
            live.live.name,
            replicas=decided.target,
            resource_version=live.live.resource_version,
            manager=AUTOSCALER_MANAGER,
        )
        logs.info("autoscaler.scaled", pipeline=str(key), stage=stage, replicas=decided.target)

    async def _mark(self, tracked: _Tracked, decided: StageDecision) -> None:
        """The emptiest replicas leave first: said on the pods before the count is written. Advice: a pod that is gone
        meanwhile, or an error, stops nobody from shrinking."""
        key = tracked.observed.key
        held = tracked.last.held.get(decided.name, {}) if tracked.last is not None else {}
        leave = decided.current - decided.target
        for pod, cost in deletion_costs(tracked.observed, decided.name, leave, held):
            self._fence()
            marks = {DELETION_COST_ANNOTATION: cost}
            try:
                await self._kube.annotate(POD, key.namespace, pod.name, marks, uid=pod.uid, manager=AUTOSCALER_MANAGER)
            except KubeError as error:
                logs.warning("autoscaler.mark_failed", pipeline=str(key), pod=pod.name, error=error.message)

    async def _say(
        self, key: Key, tracked: _Tracked, decision: Decision, reason: str, message: str, *, ready: bool, changed: bool
    ) -> bool:
        """Status and Event, where something changed: counts, or the kind of the decision. Numbers alone are no news."""
        metrics.AUTOSCALER_READY.labels(str(key)).set(1 if ready else 0)
        if not changed and reason == tracked.shown:
            return False
        if not changed and ready and tracked.shown in ("", "ScaleUp", "ScaleDown", "Steady") and reason == "Steady":
            # After a change everything is steady again: that needs no line of its own.
            first, tracked.shown = tracked.shown == "", reason
            if not first:
                return False
        tracked.shown = reason
        tracked.decisions.appendleft(as_status(decision, reason, message, self._clock()))
        said = _REASONS.get(reason, Reason.AUTOSCALING)
        tracked.scaling = Scaling(
            tuple(tracked.decisions),
            ready,
            said,
            truncate(message if not ready else _range(tracked.spec)),
            tracked.learned,
        )
        about = tracked.observed.pipeline_live
        if about is not None and (changed or not ready):
            note = Note(Reason.SCALED if changed else said, message, warning=not ready)
            await self._events.emit(about, key.namespace, (note,))
        return True


def _learned_before(observed: Observed) -> object:
    return observed.pipeline_live.status.get("learned") if observed.pipeline_live is not None else None


def _restore(tracked: _Tracked, now: float) -> dict[str, Any]:
    """Start from what an operator before this one has learned. What cannot be used is named once, and measured anew.

    Returns what was used, for the record; {}: nothing.
    """
    raw, tracked.restored = tracked.before, True
    before = restored(tracked.spec, raw, now, datetime.fromtimestamp(now, UTC))
    tracked.state = before.state or State()
    if raw is not None:
        used = before.state is not None
        logs.info("autoscaler.restored", pipeline=str(tracked.observed.key), used=used, ignored=list(before.ignored))
    return dict(raw) if before.state is not None and isinstance(raw, dict) else {}


def _learned(tracked: _Tracked, now: datetime, *, written_anyway: bool) -> bool:
    """Whether the status should have what was learned since it was last written."""
    fresh = saved(tracked.spec, tracked.state, now.timestamp(), now)
    since = now.timestamp() - tracked.learned_at
    if tracked.scaling is None or not is_due(tracked.learned, fresh, since, written_anyway=written_anyway):
        return False
    tracked.learned, tracked.learned_at = fresh, now.timestamp()
    tracked.scaling = replace(tracked.scaling, learned=fresh)
    return True


def _lately(tracked: _Tracked, now: datetime) -> Owner | None:
    """Another owner whose count was not there ten minutes ago; one that stays silent gives way."""
    owners = other_owners(tracked.observed, tracked.spec)
    tracked.others = {o: tracked.others.get(o, now) for o in owners}
    recent = (o for o, since in tracked.others.items() if (now - since).total_seconds() < SECOND_OWNER_SECONDS)
    return next(recent, None)


def _range(spec: Spec) -> str:
    """A message that does not move with every decision: each change of it is a write."""
    ours = ", ".join(f"{s.name} {s.minimum} to {s.maximum}" for s in spec.stages if not s.fixed)
    return f"follows the objectives: {ours}"


def as_status(decision: Decision, reason: str, message: str, now: datetime) -> ScalingDecision:
    counts = "; ".join(
        f"{c.label}: {', '.join(f'{n} {count}' for n, count in c.replicas)} ({c.devices} accelerators"
        + (f", TTFP {c.ttfp_seconds * 1000:.0f} ms" if c.ttfp_seconds else "")
        + ("" if c.holds else ", not enough")
        + ")"
        for c in decision.candidates
    )
    return ScalingDecision(
        time=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        reason=reason,
        message=truncate(message),
        limiting_stage=decision.limiting_stage,
        stages=tuple(
            ScalingTarget(name=s.name, before=s.current, replicas=s.target, reason=truncate(s.reason, 256))
            for s in decision.stages
        ),
        inputs=truncate(" ".join(f"{name}={value:g}" for name, value in decision.inputs)) or None,
        candidates=truncate(counts) or None,
    )


def _measure(key: Key, decision: Decision, window: Window) -> None:
    pipeline = str(key)
    metrics.AUTOSCALER_DECISIONS.labels(pipeline, decision.reason).inc()
    metrics.AUTOSCALER_WINDOW_SECONDS.labels(pipeline).set(window.end - window.start)
    for stage in decision.stages:
        metrics.AUTOSCALER_TARGET.labels(pipeline, stage.name).set(stage.target)
        metrics.AUTOSCALER_WANTED.labels(pipeline, stage.name).set(stage.wanted)
