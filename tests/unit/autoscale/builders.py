"""Pipelines, windows and fleets for the tests of scaling decisions, in a few words each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from omni_operator.autoscale.decide import decide
from omni_operator.autoscale.histogram import Histogram, of_values
from omni_operator.autoscale.types import (
    Decision,
    DeviceClass,
    Freshness,
    Limits,
    Objectives,
    Prior,
    Spec,
    StageFleet,
    StageSpec,
    StageWindow,
    Tuning,
    Window,
)
from omni_operator.autoscale.view import State

BOUNDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0)
NAMES = ("thinker", "talker", "code2wav")
WINDOW_SECONDS = 15.0

PRIORS = (
    Prior(0.008, 0.0010, 200.0, 12.0, 120.0),
    Prior(0.016, 0.0017, 600.0, 30.0, 120.0),
    Prior(0.020, 0.0080, 24.0, 1.0, 60.0),
)


def a_stage(index: int, **changes: object) -> StageSpec:
    base = StageSpec(
        name=NAMES[index],
        minimum=1,
        maximum=20,
        slots=32,
        classes=(DeviceClass("gpu", devices=(2, 1, 1)[index]),),
        audio=index > 0,
        realtime=index == 1,
        prior=PRIORS[index],
        unit_audio_seconds=(0.0, 0.08, 2.0)[index],
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def a_spec(*, objectives: Objectives | None = None, budget: int | None = None, **changes: object) -> Spec:
    """changes: for all stages; or thinker=, talker=, code2wav= a dict for one; tuning=."""
    tuning = changes.pop("tuning", Tuning())
    per_stage = {name: changes.pop(name, {}) for name in NAMES}
    stages = tuple(a_stage(i, **{**changes, **per_stage[name]}) for i, name in enumerate(NAMES))  # type: ignore[dict-item]
    return Spec("p", stages, objectives or Objectives(1.5, 0.8, 4), budget, tuning)  # type: ignore[arg-type]


def a_fleet(*counts: int, pending: tuple[int, int, int] = (0, 0, 0), draining: int = 0) -> dict[str, StageFleet]:
    return {
        name: StageFleet(name, n, ready=n - p, pending=p, draining=draining)
        for name, n, p in zip(NAMES, counts, pending, strict=True)
    }


def seconds_of(values: list[float]) -> Histogram:
    return of_values(values, BOUNDS)


def a_window(
    spec: Spec,
    fleet: Mapping[str, StageFleet],
    rate: float,
    *,
    now: float,
    seconds: float = WINDOW_SECONDS,
    audio: float = 1.0,
    slow: Mapping[str, float] | None = None,
    waiting: float = 0.0,
    freshness: Freshness = Freshness.FRESH,
) -> Window:
    """What a pipeline that obeys its priors shows at `rate` requests per second; slow: a factor per stage.

    Stages hold a request for as long as their slowest neighbour works on it; the shares of TTFP follow the batch.
    """
    slow = slow or {}
    stages, parts = [], 0.0
    count = max(0, round(rate * seconds))
    for i, stage in enumerate(spec.stages):
        requests = count * (audio if stage.audio else 1.0)
        n = max(1, fleet[stage.name].ready)
        factor = slow.get(stage.name, 1.0)
        work = requests * stage.prior.work_per_request
        per_replica = work / seconds / n
        spare = 1 - per_replica * stage.prior.slope_seconds * factor
        batch = min(200.0, per_replica * stage.prior.base_seconds * factor / spare) if spare > 0 else 200.0
        step = (stage.prior.base_seconds + stage.prior.slope_seconds * batch) * factor
        share = stage.prior.first_work * step
        parts += share if requests else 0.0
        stages.append(
            StageWindow(
                name=NAMES[i],
                arrivals=requests,
                completions=requests,
                busy_seconds=work * step,
                work=work,
                in_flight=batch * n,
                waiting=waiting,
                compute=seconds_of([share] * int(requests)),
            )
        )
    speech = int(count * audio)
    return Window(
        start=now - seconds,
        end=now,
        stages=tuple(stages),
        freshness=freshness,
        problem="" if freshness is Freshness.FRESH else f"data are {freshness.value}",
        ttfp=seconds_of([parts] * speech),
        rtf=seconds_of([0.5] * speech),
        streams=speech,
        arrivals=count,
        audio_arrivals=speech,
    )


@dataclass
class Runner:
    """Feeds windows to decide() one after the other and lets the fleet follow at once, or not at all."""

    spec: Spec
    fleet: dict[str, StageFleet]
    limits: Limits = field(default_factory=Limits)
    now: float = 0.0
    follow: bool = True
    state: State = field(default_factory=State)
    decisions: list[Decision] = field(default_factory=list)

    def step(self, rate: float, **window: object) -> Decision:
        self.now += WINDOW_SECONDS
        seen = a_window(self.spec, self.fleet, rate, now=self.now, **window)  # type: ignore[arg-type]
        return self.show(seen)

    def show(self, window: Window) -> Decision:
        decision, self.state = decide(self.spec, window, self.fleet, self.limits, self.state, self.now)
        self.decisions.append(decision)
        if self.follow:
            self.fleet = a_fleet(*(s.target for s in decision.stages))
        return decision

    def run(self, rate: float, seconds: float, **window: object) -> Decision:
        for _ in range(int(seconds / WINDOW_SECONDS)):
            decision = self.step(rate, **window)
        return decision

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self.fleet[n].target for n in NAMES)


def counts_of(decision: Decision) -> tuple[int, ...]:
    return tuple(s.target for s in decision.stages)
