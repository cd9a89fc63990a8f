"""What the model takes for chance, what it remembers, and what it knows that replicas do not help with."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.autoscale_sim.workload import TRACES_BY_NAME
from omni_operator.autoscale.attribution import find_breach
from omni_operator.autoscale.capacity import Learned, learn, tails
from omni_operator.autoscale.demand import LoadSample, comes_in_bursts, estimate
from omni_operator.autoscale.types import StageWindow, Tuning

from .builders import NAMES, a_fleet, a_spec, a_stage, a_window, seconds_of


@pytest.mark.parametrize(
    ("late", "of", "missed"),
    [(1, 8, False), (8, 8, True), (2, 30, False), (5, 30, True), (60, 1000, True), (52, 1000, False)],
)
def test_a_few_late_requests_may_be_chance(late: int, of: int, missed: bool) -> None:
    spec, fleet = a_spec(), a_fleet(2, 4, 1)
    window = a_window(spec, fleet, 1.0, now=15.0)
    window = replace(window, ttfp=seconds_of([0.6] * (of - late) + [4.0] * late))
    assert bool(find_breach(spec, window, fleet, dict.fromkeys(NAMES, Learned()))) is missed


def shown(computing: list[float], waiting: list[float]) -> Learned:
    """A stage after an hour of windows that all look like this."""
    stage, learned = a_stage(0), Learned()
    seen = StageWindow(
        "thinker", completions=20, busy_seconds=20.0, work=4000.0,
        compute=seconds_of(computing), queue=seconds_of(waiting),
    )  # fmt: skip
    for _ in range(240):
        learned = learn(learned, stage, seen, 2, 15.0, calm=True)
    return learned


def test_what_waits_and_what_computes_have_tails_of_their_own() -> None:
    """Long prompts compute long on any number of replicas; only waiting behind them is what replicas take away."""
    long_prompts = shown([0.1] * 18 + [4.0] * 2, [0.01] * 20)
    (tail,) = tails([long_prompts])
    assert tail.computing > 3
    assert tail.waiting < 1.2
    crowded = shown([0.1] * 20, [0.01] * 18 + [4.0] * 2)
    (tail,) = tails([crowded])
    assert tail.computing < 1.2
    assert tail.waiting > 3


def test_a_calm_quarter_of_an_hour_does_not_take_away_the_memory_of_a_burst() -> None:
    stage, learned = a_stage(0), shown([0.1] * 20, [0.01] * 18 + [4.0] * 2)
    calm = StageWindow(
        "thinker", completions=20, busy_seconds=20.0, work=4000.0,
        compute=seconds_of([0.1] * 20), queue=seconds_of([0.01] * 20),
    )  # fmt: skip
    before = learned
    for _ in range(40):
        learned = learn(learned, stage, calm, 2, 15.0, calm=True)
    assert before.waiting_spread / 3 < learned.waiting_spread < before.waiting_spread
    assert before.wait / 5 < learned.wait < before.wait


def test_a_slow_rise_is_seen_above_its_noise() -> None:
    """A fifth more in a quarter of an hour: five minutes of it are lost in the noise."""
    numbers = random.Random(3)

    def samples(count: int) -> list[LoadSample]:
        return [
            LoadSample(15.0 * (i + 1), 15.0, (max(0.0, 15.0 * (4.0 + 0.05 * i) + numbers.gauss(0.0, 8.0)),))
            for i in range(60)
        ][-count:]

    whole = [estimate(samples(60), 0, Tuning(), 240.0, 0.0) for _ in range(20)]
    part = [estimate(samples(20), 0, Tuning(), 240.0, 0.0) for _ in range(20)]
    grown = sum(d.planned / d.rate for d in whole) / 20
    assert grown > 1.04
    assert grown > sum(d.planned / d.rate for d in part) / 20


def test_a_longer_day_is_the_same_day() -> None:
    three, six = (len(TRACES_BY_NAME[n].arrivals(random.Random(1))) for n in ("servegen", "servegen_6h"))
    assert six == pytest.approx(2 * three, rel=0.02)


def test_the_diurnal_trace_has_a_night() -> None:
    def hourly(name: str) -> list[float]:
        """Of the mean; an hour of the day is 450 s of the trace."""
        found = TRACES_BY_NAME[name].arrivals(random.Random(1))
        hours = Counter(min(23, int(a.at // 450)) for a in found)
        return [hours[h] * 24 / len(found) for h in range(24)]

    people, everybody = hourly("servegen"), hourly("servegen_all")
    assert max(people[1:6]) < 0.3
    assert max(people) > 1.7
    assert min(everybody[1:23]) > 0.6, "batch jobs fill the night"


def minutes(*counts: float) -> list[LoadSample]:
    """Windows of a quarter of a minute, the last of them ends at 0."""
    return [
        LoadSample(-15.0 * i, 15.0, (count / 4,))
        for i, count in reversed(list(enumerate(c for m in reversed(counts) for c in [m] * 4)))
    ]


ROUGH = minutes(*[60, 120] * 15)  # of independent users with long and short requests: variance over mean 22
GAPPED = minutes(*[0, 0, 300] * 9, 0, 0, 0)


def test_a_reserve_is_not_made_twice() -> None:
    """Where the law of staffing.py has one for what is above the rate of now, a rough hour is no reason for another."""
    alone = estimate(ROUGH, 0, Tuning(), 240.0, 0.0)
    assert (alone.source, alone.planned > 1.2 * alone.rate) == ("memory", True)
    reserved = estimate(ROUGH, 0, Tuning(), 240.0, 12.0, reserved=True)
    assert reserved.source == "now"
    assert reserved.planned == pytest.approx(reserved.rate + 12.0 / 120)


def test_bursts_with_gaps_between_them_are_no_load_of_independent_users() -> None:
    """The load of now is nothing, and the next burst is over before a cold start is: the law of staffing.py has no say."""
    found = estimate(GAPPED, 0, Tuning(), 240.0, 0.0)
    assert (found.source, found.planned, found.rate) == ("memory", 5.0, 0.0)
    assert comes_in_bursts(GAPPED, 0, Tuning())
    assert not comes_in_bursts(ROUGH, 0, Tuning())
    assert not comes_in_bursts([], 0, Tuning())


def test_a_settled_load_is_followed_over_five_minutes_and_a_step_at_once() -> None:
    """A replica for what comes and goes within minutes is there when that is over; one for a step is not asked for
    five minutes late."""

    def planned(*counts: float) -> float:
        return estimate(minutes(*counts), 0, Tuning(), 240.0, 0.0, reserved=True).planned

    calm = [300, 330, 270, 300, 330] * 5
    assert planned(*calm, 300, 300, 300, 330, 330) == pytest.approx(312 / 60, rel=0.01)
    stepped = planned(*calm, 300, 300, 300, 600, 600)
    assert 0.9 * 600 / 60 < stepped <= 600 / 60
    assert planned(*calm, 300, 300, 300, 30, 30) == pytest.approx(192 / 60, rel=0.01), "a fall is followed more slowly"
