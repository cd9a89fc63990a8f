"""What decide() remembers, what it sees in one call, and how the model of a stage is put together from both. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from omni_operator.autoscale import solve as solver
from omni_operator.autoscale.attribution import Breach
from omni_operator.autoscale.capacity import (
    Learned,
    cold_start,
    first_work,
    fit,
    idle_seconds,
    learn,
    tails,
    work_per_request,
)
from omni_operator.autoscale.demand import Demand, LoadSample, estimate
from omni_operator.autoscale.solve import Goal, StageLoad
from omni_operator.autoscale.stabilise import Moves, Wish
from omni_operator.autoscale.staffing import Staffing
from omni_operator.autoscale.types import (
    Spec,
    StageFleet,
    StageSpec,
    Window,
)

# The stages' shares are means at the peak batch; measured over predicted p95 corrects their sum, within reason.
RATIO_RANGE = (0.5, 3.0)

RATIO_WEIGHT = 0.03

# What the model leaves out (long prompts in front of short ones, bursts within a window) shows as misses. Each blamed
# stage's share is held for larger until the misses are as few as the objective allows, less a reserve.
CAUTION_RANGE = (0.92, 4.0)

CAUTION_GAIN = 0.25

ALLOWED_MISSES = 0.03

STUCK_WINDOWS = 4


@dataclass(frozen=True, slots=True)
class State:
    """What decide() remembers. memory.py keeps the slow part of it over a restart; the rest comes from the next windows,
    and until then nothing shrinks."""

    learned: tuple[Learned, ...] = ()
    samples: tuple[LoadSample, ...] = ()
    wishes: tuple[Wish, ...] = ()
    moves: tuple[Moves, ...] = ()
    active: tuple[float, ...] = ()  # when a stage last had a request
    ratio: float = 1.0  # TTFP p95 over the sum of the predicted shares
    caution: tuple[float, ...] = ()  # factor on a stage's predicted share
    stuck: int = 0  # windows in a row with a queue that nothing feeds and nothing drains
    facts: tuple[str, ...] = ()  # of each stage, when it was learned
    staffing: tuple[Staffing, ...] = ()  # the slow law of a fleet that knows its stack


@dataclass(frozen=True, slots=True)
class View:
    """One decision's inputs, in the order of the spec."""

    spec: Spec
    window: Window
    fleet: tuple[StageFleet, ...]
    current: tuple[int, ...]
    demand: tuple[Demand, ...]
    breach: Breach
    ceiling: int | None
    ceiling_name: str
    state: State
    now: float
    by_law: bool  # the law of staffing.py decides, and not the model of solve.py

    @property
    def late(self) -> float:
        """Share of this window's requests beyond the objective."""
        target = self.spec.objectives.ttfp_p95_seconds
        return self.window.ttfp.share_above(target) if target is not None else 0.0


def initial(spec: Spec, state: State, now: float) -> State:
    count, facts = len(spec.stages), tuple(s.facts for s in spec.stages)
    if len(state.learned) != count:
        return State(
            (Learned(),) * count,
            (),
            (),
            (Moves(),) * count,
            (now,) * count,
            caution=(1.0,) * count,
            facts=facts,
            staffing=(Staffing(),) * count,
        )
    if len(state.staffing) != count:
        state = replace(state, staffing=(Staffing(),) * count)
    return state if state.facts == facts else _without_changed(state, facts)


def _without_changed(state: State, facts: tuple[str, ...]) -> State:
    """Another model, device or setting is another stage: what was learned of it before would mislead for long."""
    same = [a == b for a, b in zip(state.facts or facts, facts, strict=True)]
    return replace(
        state,
        learned=tuple(known if s else Learned() for s, known in zip(same, state.learned, strict=True)),
        caution=tuple(c if s else 1.0 for s, c in zip(same, state.caution, strict=True)),
        staffing=tuple(x if s else Staffing() for s, x in zip(same, state.staffing, strict=True)),
        ratio=state.ratio if all(same) else 1.0,
        wishes=state.wishes if all(same) else (),
        facts=facts,
    )


def observe(
    spec: Spec, window: Window, fleet: Mapping[str, StageFleet], state: State, now: float
) -> tuple[State, bool]:
    seen = [window.stage(s.name) for s in spec.stages]
    target = spec.objectives.ttfp_p95_seconds
    calm = not any(s.waiting > 0 for s in seen) and (
        target is None or window.ttfp.count == 0 or window.ttfp.share_above(target) <= 0.05
    )
    learned = tuple(
        learn(known, stage, data, fleet[stage.name].ready, window.seconds, calm=calm)
        for known, stage, data in zip(state.learned, spec.stages, seen, strict=True)
    )
    sample = LoadSample(window.end, window.seconds, tuple(s.arrivals for s in seen))
    oldest = window.end - spec.tuning.memory_seconds
    samples = (*(s for s in state.samples if s.end > oldest), sample)
    active = tuple(
        now if s.arrivals > 0 or s.in_flight > 0 or s.waiting > 0 else before
        for s, before in zip(seen, state.active, strict=True)
    )
    idle_queue = any(s.waiting > 0 for s in seen) and not any(
        s.completions > 0 or s.arrivals > 0 or fleet[s.name].ready < 1 for s in seen
    )
    stuck = state.stuck + 1 if idle_queue else 0
    updated = replace(state, learned=learned, samples=samples, active=active, stuck=stuck)
    if calm and target is not None and window.ttfp.count >= 10:
        updated = replace(updated, ratio=ratio_of(spec, window, fleet, updated))
    return updated, stuck >= STUCK_WINDOWS


def ratio_of(spec: Spec, window: Window, fleet: Mapping[str, StageFleet], state: State) -> float:
    """Measured p95 over what the model says of the replicas and the load that it was measured with."""
    goal = Goal(None, None, spec.tuning.confidence)
    predicted = 0.0
    for i, stage in enumerate(spec.stages):
        demand = estimate(state.samples, i, spec.tuning, 0.0, 0.0)
        load = load_of(spec, replace(state, caution=(1.0,) * len(spec.stages)), i, demand.rate, demand.dispersion, 0, 0)
        predicted += solver.evaluate(load, mix_of(stage, fleet[stage.name].ready), goal).ttfp
    measured = window.ttfp.quantile(0.95) or 0.0
    if not 0 < predicted < float("inf") or measured <= 0:
        return state.ratio
    ratio = (1 - RATIO_WEIGHT) * state.ratio + RATIO_WEIGHT * measured / predicted
    return min(RATIO_RANGE[1], max(RATIO_RANGE[0], ratio))


def cautious(view: View) -> tuple[float, ...]:
    """Misses of a stage before the replicas that it was given serve are no news."""
    spec, window, breach, caution = view.spec, view.window, view.breach, view.state.caution
    target = spec.objectives.ttfp_p95_seconds
    if target is None or window.ttfp.count == 0:
        return caution
    starting = {f.name for f in view.fleet if f.pending > 0}
    blamed = breach.stage if breach.stage not in starting else None
    missed, trust = window.ttfp.share_above(target), window.ttfp.count / (window.ttfp.count + 5.0)
    return tuple(
        min(
            CAUTION_RANGE[1],
            max(
                CAUTION_RANGE[0],
                factor * math.exp(CAUTION_GAIN * trust * ((missed if s.name == blamed else 0.0) - ALLOWED_MISSES)),
            ),
        )
        for s, factor in zip(spec.stages, caution, strict=True)
    )


def demand_of(spec: Spec, window: Window, state: State, index: int, *, stuck: bool, by_law: bool) -> Demand:
    stage = spec.stages[index]
    horizon = cold_start(state.learned[index], stage.prior)
    waiting = 0.0 if stuck else window.stage(stage.name).waiting
    if stage.minimum == 0 and window.end - state.active[index] >= spec.tuning.idle_seconds:
        return Demand(0.0, 0.0, 0.0, 1.0, False, "now")  # asleep: bursts of the past are no reason to stay awake
    return estimate(state.samples, index, spec.tuning, horizon, waiting, reserved=by_law)


def goal_of(view: View, margin: float) -> Goal:
    objectives = view.spec.objectives
    ttfp = objectives.ttfp_p95_seconds if not view.by_law else None
    return Goal(
        ttfp=None if ttfp is None else margin * ttfp / view.state.ratio,
        rtf=None if objectives.rtf_p95 is None else margin * objectives.rtf_p95,
        confidence=view.spec.tuning.confidence,
    )


def is_staffed(spec: Spec, state: State) -> bool:
    """Whether the law of staffing.py decides, which has TTFP in its constants. A fixed count is nothing to it."""
    if spec.objectives.ttfp_p95_seconds is None or not all(s.known for s in state.staffing):
        return False
    return not any(s.in_bursts for s in state.staffing)


def loads_of(view: View, lows: Sequence[int], highs: Sequence[int], spare: float = 1.0) -> list[StageLoad]:
    """spare: factor on the load that the law of staffing.py is asked for."""
    loads = []
    for i, stage in enumerate(view.spec.stages):
        low, high = (view.current[i],) * 2 if stage.fixed else (lows[i], max(lows[i], highs[i]))
        demand = view.demand[i]
        load = load_of(view.spec, view.state, i, demand.planned, demand.dispersion, low, high)
        if view.by_law and not stage.fixed:
            law, rate = view.state.staffing[i], spare * demand.planned
            load = replace(load, staffed=rate / law.capacity, reserve=law.reserve)
        loads.append(load)
    return loads


def load_of(spec: Spec, state: State, index: int, rate: float, dispersion: float, low: int, high: int) -> StageLoad:
    """A stage under `rate` requests per second, as far as it is known."""
    stage, known = spec.stages[index], state.learned[index]
    caution, tail = state.caution[index], tails(state.learned)[index]
    # Without a promise on TTFP, a queue as long as the objective allows is fine, and replicas can be fuller.
    waiting_is_fine = 0 if spec.objectives.ttfp_p95_seconds is not None else (spec.objectives.queue_per_replica or 0)
    return StageLoad(
        spec=stage,
        fit=fit(known, stage.prior, stage.slots),
        rate=rate * work_per_request(known, stage.prior),
        bound=rate * idle_seconds(known),
        first=first_work(known, stage.prior) * caution * tail.computing,
        wait=known.wait * caution * tail.waiting,
        transfer=known.transfer,
        dispersion=dispersion,
        low=low,
        high=high,
        room=float(stage.slots + waiting_is_fine),
    )


def mix_of(stage: StageSpec, count: int) -> tuple[int, ...]:
    return (count, *(0 for _ in stage.classes[1:]))
