"""The cheapest set of replica counts, over all stages at once, that keeps the objectives. Pure and exact.

TTFP is a sum over the stages, and each stage's part falls with its replicas; so which stage gets the next accelerator
is one question, not one per stage. Solved by dynamic programming over (cost, TTFP): after each stage only the sets
that no other beats in both are kept. Where the limits do not allow the whole load, the same solve finds the largest
share of it that can be served well: stages stay in proportion, and none gets replicas that another could not feed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from omni_operator.autoscale.capacity import Fit
from omni_operator.autoscale.types import StageSpec

CPU_REPLICA_COST = 0.01  # a replica without accelerators is cheap, not free
FLOOR_SLACK = 1.25
# A slow step is late for one request; a stage without room holds up everybody behind it.
ROOM_CAUTION = 3.0
NEAR_FLOOR = 1.2  # below FLOOR_SLACK
SHARE_GRID, SHARE_STEPS = 1.01, 512  # the servable load: to 1 %, down to a 160th
MAX_MIXES = 400


@dataclass(frozen=True, slots=True)
class StageLoad:
    """A stage as the solver sees it. low, high: replicas."""

    spec: StageSpec
    fit: Fit
    rate: float  # units of work per second to be ready for
    bound: float  # requests that are bound to a replica without computing there, on average
    first: float  # computing share of TTFP in step times
    wait: float  # waiting share of TTFP, seconds per squared batch
    transfer: float
    dispersion: float
    low: int
    high: int
    room: float  # requests per replica that are acceptable, the tolerated queue included
    staffed: float = 0.0  # load in replicas, where the law of staffing.py decides instead of TTFP and room; else 0
    reserve: float = 0.0  # of that law


@dataclass(frozen=True, slots=True)
class Goal:
    """ttfp: seconds, as a sum of the stages' shares; rtf: ratio. None: no such objective."""

    ttfp: float | None
    rtf: float | None
    confidence: float


@dataclass(frozen=True, slots=True)
class Option:
    """So many replicas of one stage, and what they lead to. strain above 1: overloaded."""

    count: int
    mix: tuple[int, ...]
    cost: float
    devices: int
    strain: float
    ttfp: float
    load: float
    batch: float


@dataclass(frozen=True, slots=True)
class Solution:
    options: tuple[Option, ...]
    share: float  # of the load that is served within the objectives; 1: all of it

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(o.count for o in self.options)

    @property
    def devices(self) -> int:
        return sum(o.devices for o in self.options)

    @property
    def ttfp(self) -> float:
        return sum(o.ttfp for o in self.options)


def evaluate(load: StageLoad, mix: Sequence[int], goal: Goal, share: float = 1.0) -> Option:
    """What a number of replicas of each class leads to at `share` of the load."""
    spec = load.spec
    count = sum(mix)
    power = sum(n * c.speed for n, c in zip(mix, spec.classes, strict=True))
    devices = sum(n * c.devices for n, c in zip(mix, spec.classes, strict=True))
    cost = sum(n * max(c.devices * c.cost, CPU_REPLICA_COST) for n, c in zip(mix, spec.classes, strict=True))
    rate = load.rate * share
    if power <= 0:
        idle = rate <= 0
        return Option(count, tuple(mix), cost, devices, 0.0 if idle else math.inf, 0.0 if idle else math.inf, 0.0, 0.0)
    batch = load.fit.batch(rate / power)
    if batch is None:
        overload = rate / power * load.fit.slope
        return Option(count, tuple(mix), cost, devices, 1.0 + overload, math.inf, math.inf, math.inf)
    # Requests in flight scatter around their mean like the arrivals do.
    computing = batch * power
    step = load.fit.step((computing + goal.confidence * math.sqrt(computing * load.dispersion)) / power)
    in_flight = computing + load.bound * share
    peak = (in_flight + goal.confidence * ROOM_CAUTION * math.sqrt(in_flight * load.dispersion)) / power
    strain = peak / load.room
    if load.staffed > 0:
        needed = load.staffed * share + load.reserve * math.sqrt(load.staffed * share)
        strain = max(in_flight / power / load.room, needed / power)
    if goal.rtf is not None and spec.realtime and spec.unit_audio_seconds > 0:
        strain = max(strain, step / spec.unit_audio_seconds / goal.rtf)
    # What nobody asks for delays nobody: an idle pipeline whose objective is out of reach may still shrink.
    ttfp = load.first * step + load.wait * batch * batch + load.transfer if load.rate > 0 else 0.0
    return Option(count, tuple(mix), cost, devices, strain, ttfp, in_flight, peak)


def mixes(spec: StageSpec, low: int, high: int) -> list[tuple[int, ...]]:
    """All ways to have low..high replicas of the stage's classes; just the numbers where there is one class."""
    if len(spec.classes) == 1:
        limit = spec.classes[0].available
        top = high if limit is None else max(low, min(high, limit))
        return [(n,) for n in range(low, top + 1)]
    ranges = [range(min(high, c.available if c.available is not None else high) + 1) for c in spec.classes]
    found = [mix for mix in itertools.product(*ranges) if low <= sum(mix) <= high]
    found.sort(key=lambda mix: (sum(mix), mix))
    return found[:MAX_MIXES]


def solve(loads: Sequence[StageLoad], goal: Goal, ceiling: int | None) -> Solution | None:
    """None: even the lower bounds are above the ceiling."""
    whole = _at(loads, goal, ceiling, 1.0)
    if whole is not None:
        return whole
    best = _at(loads, goal, ceiling, 0.0)
    if best is None:
        return None
    # On a grid of loads that does not depend on the load: whatever is too much gets the same answer.
    rate = max(x.rate for x in loads)
    if rate <= 0:
        return best
    high = math.floor(math.log(rate) / math.log(SHARE_GRID)) + 1
    low = high - SHARE_STEPS
    while high - low > 1:
        middle = (low + high) // 2
        found = _at(loads, goal, ceiling, SHARE_GRID**middle / rate)
        if found is None:
            high = middle
        else:
            low, best = middle, found
    return best


def reachable(loads: Sequence[StageLoad], goal: Goal) -> float | None:
    """The TTFP that is aimed at: the objective, or just above what replicas without load would reach."""
    if goal.ttfp is None:
        return None
    best = sum(x.first * x.fit.step(1.0) + x.transfer for x in loads if x.rate > 0)
    return max(goal.ttfp, best * FLOOR_SLACK)


def _at(loads: Sequence[StageLoad], goal: Goal, ceiling: int | None, share: float) -> Solution | None:
    target = reachable(loads, goal)
    frontier: list[tuple[float, float, int, tuple[Option, ...]]] = [(0.0, 0.0, 0, ())]
    for load in loads:
        options = _options(load, goal, share, target)
        if not options:
            return None
        grown = [
            (cost + o.cost, ttfp + o.ttfp, devices + o.devices, (*chosen, o))
            for cost, ttfp, devices, chosen in frontier
            for o in options
            if ceiling is None or devices + o.devices <= ceiling or o.devices == 0
        ]
        frontier = _undominated(grown, target)
        if not frontier:
            return None
    for _, ttfp, _, chosen in frontier:  # cheapest first
        if target is None or ttfp <= target + 1e-9:
            return Solution(chosen, share)
    return None


def _options(load: StageLoad, goal: Goal, share: float, target: float | None) -> list[Option]:
    """Counts that are not overloaded. Beyond the point where one more helps nobody, they end."""
    found: list[Option] = []
    for mix in mixes(load.spec, load.low, load.high):
        option = evaluate(load, mix, goal, share)
        if option.strain > 1.0 and share > 0:
            continue
        found.append(option)
        if len(load.spec.classes) == 1 and len(found) > 1:
            # Close enough to what no replica can beat: with all stages there, any target is met (see `reachable`).
            near = option.ttfp <= NEAR_FLOOR * (load.first * load.fit.step(1.0) + load.transfer)
            if target is None or (near and found[-2].ttfp - option.ttfp < 0.005 * target):
                break
    return found


def _undominated(
    sets: list[tuple[float, float, int, tuple[Option, ...]]], target: float | None
) -> list[tuple[float, float, int, tuple[Option, ...]]]:
    sets.sort(key=lambda s: (round(s[0], 6), s[1], s[2]))
    kept: list[tuple[float, float, int, tuple[Option, ...]]] = []
    best, fewest = math.inf, math.inf
    for candidate in sets:
        _, ttfp, devices, _ = candidate
        if target is not None and ttfp > target + 1e-9:
            continue
        # More expensive is worth keeping only if it is faster, or needs fewer devices (classes of different prices).
        if ttfp < best - 1e-9 or devices < fewest:
            kept.append(candidate)
            best, fewest = min(best, ttfp), min(fewest, devices)
    return kept
