"""How many replicas a load needs, for a fleet that knows its stack: a queue's law whose constants are learned slowly and
kept over days. Pure.

    replicas = a + reserve * sqrt(a),   a = load / what one replica can bear

The root is what independent users scatter by (square-root staffing). What one replica can bear comes from the model of
capacity.py, averaged over hours: a count must not follow the noise of the last minutes. The reserve of a stage moves with
the late requests that it is to blame for, until all stages together are late as often as the objective allows, each in
proportion to what a further replica of it would cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from omni_operator.autoscale.capacity import Learned, first_work, fit, idle_seconds, work_per_request
from omni_operator.autoscale.types import Spec, StageFleet, StageSpec, StageWindow, Window

MEMORY_WINDOWS = 480.0  # of the capacity: two hours
TAKES_OVER = 100.0  # windows with requests, 25 minutes: until then the model of solve.py decides
START_RESERVE = 1.2
AIMED_LATE = 0.033  # share of the requests: a p95 allows five of a hundred
GAIN = 0.1  # per window in which all are late; the first windows after a start or restart count more
EAGER, EAGER_WINDOWS = 9.0, 100.0
TRUST_REQUESTS = 50.0  # a window with so many weighs half
RESERVE_RANGE = (0.0, 5.0)
CHANGED = 2.0  # now over the average: another world, the average starts anew
MIN_REPLICAS_OF_LOAD = 0.05


@dataclass(frozen=True, slots=True)
class Staffing:
    """capacity: requests per second that one replica bears, 0: not known; windows: behind it. judged: windows that the
    reserve has been learned from."""

    capacity: float = 0.0
    windows: float = 0.0
    reserve: float = START_RESERVE
    judged: float = 0.0

    @property
    def known(self) -> bool:
        """Whether the law can decide. Once it has, it goes on: a capacity that starts anew is learned within minutes, a
        reserve is not."""
        return self.capacity > 0 and (self.windows >= TAKES_OVER or self.judged > 0)


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
    *,
    by_law: bool,
) -> tuple[Staffing, ...]:
    """After one more window. by_law: whether this law decides; where it does not, who is late says nothing of its reserve."""
    target = spec.objectives.ttfp_p95_seconds
    if target is None:
        return tuple(before)
    seen = [window.stage(s.name) for s in spec.stages]
    capacities = tuple(
        _averaged(b, bears(s, k, target)) if w.completions > 0 else b
        for b, s, k, w in zip(before, spec.stages, learned, seen, strict=True)
    )
    if not by_law:
        return capacities
    return _reserves(spec, window, fleet, learned, capacities, target)


def _averaged(before: Staffing, now: float) -> Staffing:
    if now <= 0:
        return before
    if before.windows <= 0 or not before.capacity / CHANGED <= now <= before.capacity * CHANGED:
        windows = min(before.windows, 1.0)
        old = before.capacity if windows > 0 else now
        return replace(before, capacity=(windows * old + now) / (windows + 1), windows=windows + 1)
    weight = 1.0 / min(MEMORY_WINDOWS, before.windows + 1)
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
    trust = count / (count + TRUST_REQUESTS)
    low, high = RESERVE_RANGE
    return tuple(
        replace(
            s,
            reserve=min(high, max(low, s.reserve + _gain(s) * trust * (late * b - AIMED_LATE * p))),
            judged=s.judged + 1.0,
        )
        for s, b, p in zip(before, blame, prices, strict=True)
    )


def _gain(s: Staffing) -> float:
    return GAIN * (1.0 + EAGER / (1.0 + s.judged / EAGER_WINDOWS))


def _blame(
    spec: Spec, window: Window, fleet: Mapping[str, StageFleet], learned: Sequence[Learned]
) -> tuple[float, ...]:
    """Shares of the late requests: by how much the slow ones of each stage are above what an empty replica would do."""
    seen = [window.stage(s.name) for s in spec.stages]
    if any(s.waiting > 0 for s in seen):
        full = [w.in_flight / (s.slots * max(1, fleet[s.name].ready)) for s, w in zip(spec.stages, seen, strict=True)]
        worst = max(range(len(full)), key=lambda i: full[i])
        return tuple(1.0 if i == worst else 0.0 for i in range(len(full)))
    above = [max(0.0, _slow(w) - _empty(s, k)) for s, w, k in zip(spec.stages, seen, learned, strict=True)]
    whole = sum(above)
    return tuple(x / whole if whole > 0 else 0.0 for x in above)


def _slow(seen: StageWindow) -> float:
    return (seen.compute.quantile(0.95) or 0.0) + (seen.queue.quantile(0.95) or 0.0)


def _empty(stage: StageSpec, known: Learned) -> float:
    return first_work(known, stage.prior) * fit(known, stage.prior, stage.slots).step(1.0)


def _prices(spec: Spec, window: Window, staffing: Sequence[Staffing]) -> tuple[float, ...]:
    """Where hours are fewest: lateness of a stage in proportion to its cost and to the root of its load."""
    found = []
    for stage, known in zip(spec.stages, staffing, strict=True):
        rate = window.stage(stage.name).arrivals / window.seconds
        load = rate / known.capacity if known.capacity > 0 else 0.0
        cost = max(0.1, stage.classes[0].devices * stage.classes[0].cost)
        found.append(cost * math.sqrt(max(MIN_REPLICAS_OF_LOAD, load)))
    whole = sum(found)
    return tuple(p / whole for p in found)
