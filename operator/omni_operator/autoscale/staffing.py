"""How many replicas a load needs, for a fleet that knows its stack: a queue's law whose constants are learned slowly and
kept over days. Pure.

    replicas = a + reserve * sqrt(a),   a = load / what one replica can bear

The root is what independent users scatter by (square-root staffing). What one replica can bear comes from the model of
capacity.py, averaged over hours: a count must not follow the noise of the last minutes. The reserve of a stage moves with
the late requests that it is to blame for, until all stages together are late as often as the objective allows, each in
proportion to what a further replica of it would cost.

All of it counts requests, not minutes. An objective is a share of the requests of a day, and one replica more saves many
of them at noon and few at night: a night whose few requests are late must not teach a reserve that noon pays for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from omni_operator.autoscale.capacity import Learned, first_work, fit, idle_seconds, work_per_request
from omni_operator.autoscale.types import Spec, StageFleet, StageSpec, StageWindow, Window

MEMORY_WINDOWS = 480.0  # of the capacity: two hours
TAKES_OVER = 100.0  # windows with requests, 25 minutes: until then the model of solve.py decides
START_RESERVE = 1.3
AIMED_LATE = 0.041  # share of the requests: a p95 allows five of a hundred
GAIN = 0.004  # per usual window in which all are late; the first windows count more, as in an average
EAGER, EAGER_WINDOWS = 120.0, 30.0
DAY_WINDOWS = 5760.0  # of what is usual
TRUST_REQUESTS = 10.0  # a window with so few proves half as much
MAX_GAIN = 0.5  # of one window
BUSIEST = 5.0  # a window weighs by its requests, up to so many times a usual one
RESERVE_RANGE = (0.0, 5.0)
CHANGED = 2.0  # now over the average: in so many usual windows in a row, another world, and the average starts anew
CHANGED_WINDOWS = 20.0
MIN_REPLICAS_OF_LOAD = 0.05
MIN_TAIL = 0.3  # a reserve near 0 is no normal tail
IN_BURSTS = 0.5  # share of the requests


@dataclass(frozen=True, slots=True)
class Staffing:
    """capacity: requests per second that one replica bears, 0: not known; windows: behind it. judged: windows that the
    reserve has been learned from. usual: requests per second over a day of windows that had any; watched: how many.
    bursty: share of the requests of about two usual hours that came in bursts with gaps. doubted: usual windows in a row
    that saw another capacity."""

    capacity: float = 0.0
    windows: float = 0.0
    reserve: float = START_RESERVE
    judged: float = 0.0
    usual: float = 0.0
    watched: float = 0.0
    bursty: float = 0.0
    doubted: float = 0.0

    @property
    def known(self) -> bool:
        """Whether the law can decide. Once it has, it goes on: a capacity that starts anew is learned within minutes, a
        reserve is not."""
        return self.capacity > 0 and (self.windows >= TAKES_OVER or self.judged > 0)

    @property
    def in_bursts(self) -> bool:
        """Whether bursts with gaps bring most of the requests: of those the law says nothing. Not a few in a quiet night:
        the model kept capacity for such a one for an hour (16 h of a whole day)."""
        return self.bursty > IN_BURSTS


def bears(stage: StageSpec, known: Learned, ttfp_seconds: float) -> float:
    """Requests per second at which one replica has its slots taken, or one request in its first work all the time, or at
    which its own share of TTFP alone fills the objective: whichever comes first."""
    line, prior = fit(known, stage.prior, stage.slots), stage.prior
    first, work, idle = first_work(known, prior), work_per_request(known, prior), idle_seconds(known)

    def rate(batch: float) -> float:
        return batch / (line.step(batch) * work)

    def fits(batch: float) -> bool:
        share = first * line.step(batch) + known.wait * batch * batch + known.transfer
        alone = rate(batch) * first * line.step(batch) <= 1.0
        return share <= ttfp_seconds and alone and batch + rate(batch) * idle <= stage.slots

    low, high = 0.0, float(stage.slots)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return rate(max(low, 1e-3)) if line.step(low) > 0 and work > 0 else 0.0


def staffed(
    spec: Spec,
    window: Window,
    fleet: Mapping[str, StageFleet],
    learned: Sequence[Learned],
    before: Sequence[Staffing],
    bursts: Sequence[bool],
    *,
    by_law: bool,
) -> tuple[Staffing, ...]:
    """After one more window. bursts: of each stage, whether its load comes so now. by_law: whether this law decides; where
    it does not, who is late says nothing of its reserve."""
    target = spec.objectives.ttfp_p95_seconds
    if target is None:
        return tuple(before)
    seen = [window.stage(s.name) for s in spec.stages]
    heard = [_heard(b, w.arrivals / window.seconds, burst) for b, w, burst in zip(before, seen, bursts, strict=True)]
    capacities = tuple(
        _averaged(b, bears(s, k, target), _weight(b.usual, w.arrivals / window.seconds)) if w.completions > 0 else b
        for b, s, k, w in zip(heard, spec.stages, learned, seen, strict=True)
    )
    if not by_law:
        return capacities
    return _reserves(spec, window, fleet, learned, capacities, target)


def _heard(before: Staffing, rate: float, burst: bool) -> Staffing:
    if rate <= 0:
        return before
    watched = min(DAY_WINDOWS, before.watched + 1)
    usual = before.usual + (rate - before.usual) / watched
    weight = min(1.0, _weight(usual, rate) / min(MEMORY_WINDOWS, watched))
    bursty = before.bursty + weight * (float(burst) - before.bursty)
    return replace(before, usual=usual, watched=watched, bursty=bursty)


def _weight(usual: float, rate: float) -> float:
    """Of a window, by its requests per second; 1: a usual one."""
    return min(BUSIEST, rate / usual) if usual > 0 else 1.0


def _averaged(before: Staffing, now: float, weight: float) -> Staffing:
    """weight: of this window, where 1 is a usual one."""
    if now <= 0:
        return before
    if before.windows <= 0:
        return replace(before, capacity=now, windows=1.0)
    same = before.capacity / CHANGED <= now <= before.capacity * CHANGED
    before = replace(before, doubted=0.0 if same else before.doubted + weight)
    if before.doubted >= CHANGED_WINDOWS:
        return replace(before, capacity=now, windows=1.0, doubted=0.0)
    weight = min(0.5, weight / min(MEMORY_WINDOWS, before.windows + 1))
    # Of logarithms: half as much and twice as much are equally far away.
    capacity = math.exp((1 - weight) * math.log(before.capacity) + weight * math.log(now))
    return replace(before, capacity=capacity, windows=min(MEMORY_WINDOWS, before.windows + 1))


def _reserves(
    spec: Spec,
    window: Window,
    fleet: Mapping[str, StageFleet],
    learned: Sequence[Learned],
    before: tuple[Staffing, ...],
    target: float,
) -> tuple[Staffing, ...]:
    count = window.ttfp.count
    if count <= 0:
        return before
    late = window.ttfp.share_above(target)
    blame = _blame(spec, window, fleet, learned)
    prices = _prices(spec, window, before)
    weight = _weight(max(s.usual for s in before), count / window.seconds) * count / (count + TRUST_REQUESTS)
    low, high = RESERVE_RANGE
    return tuple(
        replace(
            s,
            reserve=min(high, max(low, s.reserve + _gain(s, weight) * (late * b - AIMED_LATE * p))),
            judged=s.judged + 1.0,
        )
        for s, b, p in zip(before, blame, prices, strict=True)
    )


def _gain(s: Staffing, weight: float) -> float:
    return min(MAX_GAIN, weight * GAIN * (1.0 + EAGER / (1.0 + s.judged / EAGER_WINDOWS)))


def _blame(
    spec: Spec, window: Window, fleet: Mapping[str, StageFleet], learned: Sequence[Learned]
) -> tuple[float, ...]:
    """Shares of the late requests: by what more replicas of each stage could have taken from the slow ones."""
    seen = [window.stage(s.name) for s in spec.stages]
    if any(s.waiting > 0 for s in seen):
        full = [w.in_flight / (s.slots * max(1, fleet[s.name].ready)) for s, w in zip(spec.stages, seen, strict=True)]
        worst = max(range(len(full)), key=lambda i: full[i])
        return tuple(1.0 if i == worst else 0.0 for i in range(len(full)))
    above = [_avoidable(s, k, w, fleet[s.name].ready) for s, w, k in zip(spec.stages, seen, learned, strict=True)]
    whole = sum(above)
    return tuple(x / whole if whole > 0 else 0.0 for x in above)


def _avoidable(stage: StageSpec, known: Learned, seen: StageWindow, ready: int) -> float:
    """Seconds of the slow ones that they would not have taken on an empty replica: a long prompt is slow on any."""
    line, batch = fit(known, stage.prior, stage.slots), seen.in_flight / max(1, ready)
    full = line.step(max(1.0, batch))
    crowd = max(0.0, 1.0 - line.step(1.0) / full) if full > 0 else 0.0
    return (seen.queue.quantile(0.95) or 0.0) + crowd * (seen.compute.quantile(0.95) or 0.0)


def _prices(spec: Spec, window: Window, staffing: Sequence[Staffing]) -> tuple[float, ...]:
    """Where hours are fewest: lateness of a stage in proportion to what a unit of its reserve costs (its price, times the
    root of its load), and to how little that unit helps. Of a normal tail it takes away a share as large as the reserve is.
    """
    found = []
    for stage, known in zip(spec.stages, staffing, strict=True):
        rate = window.stage(stage.name).arrivals / window.seconds
        load = rate / known.capacity if known.capacity > 0 else 0.0
        cost = max(0.1, stage.classes[0].devices * stage.classes[0].cost)
        found.append(cost * math.sqrt(max(MIN_REPLICAS_OF_LOAD, load)) / max(MIN_TAIL, known.reserve))
    whole = sum(found)
    return tuple(p / whole for p in found)
