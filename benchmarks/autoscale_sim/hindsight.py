"""The fewest accelerator-hours that somebody who knows the whole trace needs, one set of counts per interval.

What an autoscaler loses by not knowing what comes is the difference to this, and what is below it nobody can have. Each
interval is simulated alone with the counts around those that it needs, since who is late hardly depends on counts of
long ago; then hours + price * misses is smallest over all intervals, and the price is such that as few miss as may
(Lagrange's relaxation: `floor` is what its dual proves for the sets that were looked at, the neighbours of the best one
among them). The whole schedule is simulated at the end, and corrected until it attains what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from benchmarks.autoscale_sim.engine import Simulation
from benchmarks.autoscale_sim.entities import Request
from benchmarks.autoscale_sim.oracle import BIN_SECONDS, needed
from benchmarks.autoscale_sim.stack import Stack

LEAD_SECONDS = 60.0  # of load before an interval that is looked at: longer than most answers take
PRICES = (1e-6, 10.0)  # hours per miss
TRIMS = 24  # whole simulations that are spent on what the relaxation leaves over
CORRECTIONS = 6
UNLIMITED = 10**6

Counts = tuple[int, ...]


class Arrived(NamedTuple):
    at: float
    prompt: int
    tokens: int
    frames: int


@dataclass(frozen=True, slots=True)
class Problem:
    """cold: seconds of a start that are paid for, each asked for so early that nobody waits; None: replicas are there at
    once and cost nothing before."""

    stack: Stack
    arrivals: tuple[Arrived, ...]
    ttfp_seconds: float
    until: float
    interval: float
    attainment: float
    cold: Counts | tuple[float, ...] | None = None

    @property
    def intervals(self) -> int:
        return math.ceil(self.until / self.interval)

    @property
    def allowed(self) -> int:
        """Audio requests that may be late."""
        return math.floor((1.0 - self.attainment) * sum(a.frames > 0 for a in self.arrivals) + 1e-9)


@dataclass(frozen=True, slots=True)
class Hindsight:
    """hours, attainment: of the whole simulation, drains included. floor: hours that no choice of the sets looked at beats."""

    schedule: tuple[Counts, ...]
    hours: float
    attainment: float
    floor: float
    cells: int


def problem_of(
    stack: Stack,
    requests: Sequence[Request],
    ttfp_seconds: float,
    until: float,
    *,
    interval: float,
    attainment: float,
    paid: bool,
) -> Problem:
    cold = tuple(s.cold_seconds for s in stack.servers) if paid else None
    if cold is not None and max(cold) > interval:
        raise ValueError(f"a start of {max(cold):.0f} s does not fit into an interval of {interval:.0f} s")
    arrivals = tuple(Arrived(r.arrived, r.prompt, r.tokens, r.frames) for r in requests)
    return Problem(stack, arrivals, ttfp_seconds, until, interval, attainment, cold)


def late(requests: Sequence[Request], since: float, ttfp_seconds: float) -> int:
    return sum(r.audio and r.arrived >= since and not 0 <= r.first - r.arrived <= ttfp_seconds for r in requests)


class Cells:
    """Who is late in one interval with one set of counts; each is simulated once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._need = needed(problem.stack, [Request(*a) for a in problem.arrivals], problem.until)
        self.known: list[dict[Counts, int]] = [{} for _ in range(problem.intervals)]

    def mean_need(self, start: float, end: float) -> tuple[float, ...]:
        first, last = max(0, int(start / BIN_SECONDS)), max(1, int(end / BIN_SECONDS))
        return tuple(sum(n[first:last]) / max(1, len(n[first:last])) for n in self._need)

    def usual(self, index: int) -> Counts:
        """Where the search begins."""
        start = index * self._problem.interval
        return tuple(math.ceil(n) for n in self.mean_need(start, start + self._problem.interval))

    def look(self, index: int, counts: Counts) -> None:
        if counts not in self.known[index]:
            self.known[index][counts] = self._simulate(index, counts)

    def _simulate(self, index: int, counts: Counts) -> int:
        problem = self._problem
        start, end = index * problem.interval, (index + 1) * problem.interval
        requests = [Request(*a) for a in problem.arrivals if start - LEAD_SECONDS <= a.at < end]
        # Before it begins, replicas are as full as they are on average in it: neither rested nor with a backlog.
        before = self.mean_need(start - LEAD_SECONDS, start)
        during = self.mean_need(start, end)
        lead = [max(n, round(n * b / d)) for n, b, d in zip(counts, before, during, strict=True)]
        simulation = Simulation(problem.stack, requests, lead, devices=UNLIMITED, seed=0, cold=lambda *_: 0.0)
        simulation.call_at(start, lambda: scale(simulation, counts))
        simulation.run(end + problem.ttfp_seconds)
        return late(requests, start, problem.ttfp_seconds)


def scale(simulation: Simulation, counts: Sequence[int]) -> None:
    for stage, count in enumerate(counts):
        simulation.scale(stage, count)


def hours_of(problem: Problem, index: int, counts: Counts) -> float:
    seconds = min(problem.interval, problem.until - index * problem.interval)
    return sum(n * s.devices for n, s in zip(counts, problem.stack.servers, strict=True)) * seconds / 3600


def start_hours(problem: Problem, before: Counts, after: Counts) -> float:
    """What it costs that more are there than before, while they start."""
    if problem.cold is None:
        return 0.0
    pairs = zip(before, after, problem.cold, problem.stack.servers, strict=True)
    return sum(max(0, b - a) * cold * server.devices for a, b, cold, server in pairs) / 3600


def cheapest(problem: Problem, cells: Cells, price: float) -> tuple[tuple[Counts, ...], float]:
    """The schedule with the least hours + price * misses, and that sum: from left to right, the best way to each set."""
    best: dict[Counts, tuple[float, tuple[Counts, ...]]] = {}
    for index, known in enumerate(cells.known):
        reached: dict[Counts, tuple[float, tuple[Counts, ...]]] = {}
        cheap = min(best.items(), key=lambda b: b[1][0], default=None)
        for counts, missed in known.items():
            own = hours_of(problem, index, counts) + price * missed
            if cheap is None:
                reached[counts] = (own, (counts,))
                continue
            ways = best.items() if problem.cold is not None else (cheap,)
            cost, before = min(((c + start_hours(problem, p, counts), p) for p, (c, _) in ways))
            reached[counts] = (cost + own, (*best[before][1], counts))
        best = reached
    cost, path = min(best.values())
    return path, cost


def missed(cells: Cells, path: Sequence[Counts]) -> int:
    return sum(known[counts] for known, counts in zip(cells.known, path, strict=True))


def within(problem: Problem, cells: Cells, allowed: float) -> tuple[tuple[Counts, ...], float]:
    """(the schedule at the lowest price at which as few miss as `allowed`, what the relaxation proves)."""
    low, high = PRICES
    path, floor = cheapest(problem, cells, high)[0], 0.0
    for _ in range(24):
        price = math.sqrt(low * high)
        found, cost = cheapest(problem, cells, price)
        floor = max(floor, cost - price * allowed)
        if missed(cells, found) <= allowed:
            path, high = found, price
        else:
            low = price
    return path, floor


def around(counts: Counts) -> Iterator[Counts]:
    """One more, one fewer, and one replica of a stage for one of another."""
    steps = [(i, d) for i in range(len(counts)) for d in (-1, 1)]
    changes = [((i, d),) for i, d in steps] + [
        ((i, 1), (j, -1)) for i, _ in steps[::2] for j, _ in steps[::2] if i != j
    ]
    for change in changes:
        found = list(counts)
        for stage, step in change:
            found[stage] += step
        if min(found) >= 1:
            yield tuple(found)


def explore(problem: Problem, cells: Cells, allowed: float) -> tuple[Counts, ...]:
    """The best schedule, all neighbours of which are known."""
    while True:
        path, _ = within(problem, cells, allowed)
        before = count(cells)
        for index, counts in enumerate(path):
            for other in around(counts):
                cells.look(index, other)
        if count(cells) == before:
            return path


def count(cells: Cells) -> int:
    return sum(map(len, cells.known))


def whole(problem: Problem, path: Sequence[Counts]) -> tuple[float, int]:
    """(hours, misses) of a schedule in one simulation of the whole trace."""
    requests = [Request(*a) for a in problem.arrivals]
    cold = problem.cold or (0.0,) * len(path[0])
    simulation = Simulation(
        problem.stack, requests, path[0], devices=UNLIMITED, seed=0, cold=lambda stage, _: cold[stage]
    )
    for index, (before, after) in enumerate(pairwise(path), start=1):
        for stage, (a, b) in enumerate(zip(before, after, strict=True)):
            if a != b:
                when = index * problem.interval - (cold[stage] if b > a else 0.0)
                simulation.call_at(when, lambda stage=stage, b=b: simulation.scale(stage, b))  # type: ignore[misc]
    simulation.run(problem.until)
    return simulation.device_seconds / 3600, late(requests, 0.0, problem.ttfp_seconds)


def trimmed(
    problem: Problem, cells: Cells, path: tuple[Counts, ...], hours: float, misses: int
) -> tuple[tuple[Counts, ...], float, int]:
    """One replica less where that costs the fewest misses per hour, as long as not too many are late."""

    def fewer() -> list[tuple[float, int, Counts]]:
        found = []
        for index, counts in enumerate(path):
            for other in around(counts):
                saved = hours_of(problem, index, counts) - hours_of(problem, index, other)
                more = cells.known[index].get(other, UNLIMITED) - cells.known[index][counts]
                if saved > 0 and more <= problem.allowed - misses:
                    found.append((more / saved, index, other))
        return sorted(found)

    tried: set[tuple[int, Counts]] = set()
    for _ in range(TRIMS):
        move = next((m for m in fewer() if m[1:] not in tried), None)
        if move is None:
            break
        _, index, counts = move
        tried.add((index, counts))
        changed = (*path[:index], counts, *path[index + 1 :])
        found = whole(problem, changed)
        if found[1] <= problem.allowed and found[0] < hours:
            path, (hours, misses) = changed, found
            for other in around(counts):
                cells.look(index, other)
    return path, hours, misses


def best_counts(problem: Problem) -> Hindsight:
    """Raises ValueError where no counts attain what is asked for."""
    cells = Cells(problem)
    for index in range(problem.intervals):
        cells.look(index, cells.usual(index))
    allowed = float(problem.allowed)
    found: tuple[tuple[Counts, ...], float, int] | None = None
    for _ in range(CORRECTIONS):
        path = explore(problem, cells, allowed)
        hours, misses = whole(problem, path)
        if misses <= problem.allowed and (found is None or hours < found[1]):
            found = path, hours, misses
        off = problem.allowed - misses
        if 0 <= off <= 0.01 * problem.allowed:
            break
        allowed = max(0.0, allowed + off)
    if found is None:
        raise ValueError(f"no counts were found with which {problem.attainment:.1%} are in time")
    path, hours, misses = trimmed(problem, cells, *found)
    audio = sum(a.frames > 0 for a in problem.arrivals)
    _, floor = within(problem, cells, problem.allowed)
    return Hindsight(path, hours, 1.0 - misses / audio, floor, count(cells))
