"""The bound that autoscalers are held against: no schedule of its kind is cheaper, and its figures are a simulation's."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from benchmarks.autoscale_sim import hindsight
from benchmarks.autoscale_sim.entities import Request
from benchmarks.autoscale_sim.hindsight import (
    Cells,
    Counts,
    Hindsight,
    Problem,
    best_counts,
    problem_of,
    trimmed,
    whole,
)
from benchmarks.autoscale_sim.stack import DOCUMENTED


def a_problem(
    rates: tuple[float, ...], *, interval: float = 60.0, attainment: float = 0.95, paid: bool = False
) -> Problem:
    """One rate per interval."""
    numbers, requests = random.Random(5), []
    for index, rate in enumerate(rates):
        at = index * interval
        while (at := at + numbers.expovariate(rate)) < (index + 1) * interval:
            tokens = numbers.randint(30, 120)
            requests.append(Request(at, 200, tokens, 3 * tokens if numbers.random() < 0.6 else 0))
    until = len(rates) * interval
    return problem_of(DOCUMENTED, requests, 1.5, until, interval=interval, attainment=attainment, paid=paid)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return a_problem((2.0, 7.0))


@pytest.fixture(scope="module")
def found(problem: Problem) -> Hindsight:
    return best_counts(problem)


def attained(problem: Problem, path: tuple[Counts, ...]) -> tuple[float, bool]:
    hours, misses = whole(problem, path)
    return hours, misses <= problem.allowed


def test_no_schedule_is_cheaper_and_attains_as_much(problem: Problem, found: Hindsight) -> None:
    """All that have up to four thinkers and five talkers: every one, in the whole simulation."""
    sets = [(a, b, 1) for a in range(1, 5) for b in range(1, 6)]
    assert set(found.schedule) <= set(sets), "the optimum is not among those that are tried"
    floor = found.hours * 0.999
    cheaper = [
        path
        for path in itertools.product(sets, repeat=2)
        if sum(hindsight.hours_of(problem, i, c) for i, c in enumerate(path)) < floor
    ]
    assert len(cheaper) > 10
    assert not [path for path in cheaper if all(attained(problem, path))]


def test_the_figures_are_those_of_a_simulation(problem: Problem, found: Hindsight) -> None:
    hours, misses = whole(problem, found.schedule)
    audio = sum(a.frames > 0 for a in problem.arrivals)
    assert (found.hours, found.attainment) == (hours, 1 - misses / audio)
    assert found.attainment >= problem.attainment
    assert found.floor <= found.hours


def test_more_load_gets_more_and_less_attainment_costs_less(problem: Problem, found: Hindsight) -> None:
    quiet, busy = found.schedule
    assert sum(busy) > sum(quiet)
    assert best_counts(replace(problem, attainment=0.3)).hours < found.hours


def test_what_is_left_over_is_taken_away(problem: Problem, found: Hindsight) -> None:
    cells = Cells(problem)
    more = tuple((a, b + 1, c) for a, b, c in found.schedule)
    for index, counts in enumerate(more):
        for near in (counts, *hindsight.around(counts)):
            cells.look(index, near)
    _, hours, misses = trimmed(problem, cells, more, *whole(problem, more))
    assert hours == pytest.approx(found.hours)
    assert misses <= problem.allowed


def test_an_interval_alone_is_what_it_is_in_the_whole() -> None:
    """Also one with too few replicas after one with many."""
    problem = a_problem((8.0, 3.0))
    cells, path = Cells(problem), ((3, 5, 1), (1, 1, 1))
    for index, counts in enumerate(path):
        cells.look(index, counts)
    _, misses = whole(problem, path)
    assert misses > 20
    assert hindsight.missed(cells, path) == pytest.approx(misses, rel=0.2)


def test_starts_that_are_paid_for_cost_their_hours_and_nobody_waits_for_one() -> None:
    problem = a_problem((0.5, 2.5), interval=240.0, paid=True)
    paid = best_counts(problem)
    quiet, busy = paid.schedule
    starts = hindsight.start_hours(problem, quiet, busy)
    assert starts > 0
    hours, misses = whole(replace(problem, cold=None), paid.schedule)
    assert paid.hours == pytest.approx(hours + starts)
    audio = sum(a.frames > 0 for a in problem.arrivals)
    assert paid.attainment == pytest.approx(1 - misses / audio, abs=0.01)


def test_what_nobody_attains_is_said() -> None:
    slow = replace(a_problem((1.0,), attainment=0.9), ttfp_seconds=0.1)
    with pytest.raises(ValueError, match=r"90\.0%"):
        best_counts(slow)


def test_a_start_longer_than_an_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="240 s"):
        problem_of(DOCUMENTED, [], 1.5, 600.0, interval=60.0, attainment=0.9, paid=True)
