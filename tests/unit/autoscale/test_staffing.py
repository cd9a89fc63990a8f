"""The law of a fleet that knows its stack: when it decides, what it asks for, and how its constants move."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_operator.autoscale.capacity import Fit, Learned
from omni_operator.autoscale.demand import comes_in_bursts
from omni_operator.autoscale.memory import restored, saved
from omni_operator.autoscale.solve import Goal, StageLoad, evaluate
from omni_operator.autoscale.staffing import (
    AIMED_LATE,
    CHANGED_WINDOWS,
    MEMORY_WINDOWS,
    RESERVE_RANGE,
    START_RESERVE,
    TAKES_OVER,
    Staffing,
    bears,
    staffed,
)
from omni_operator.autoscale.types import Freshness, Objectives, Tuning, Window
from omni_operator.autoscale.view import State, is_staffed

from .builders import NAMES, Runner, a_fleet, a_spec, a_stage, a_window, counts_of, seconds_of

SPEC = a_spec()
TTFP = 1.5
SMOOTH = (False,) * len(NAMES)  # no stage's load comes in bursts


@cache
def _ten_minutes() -> State:
    runner = Runner(SPEC, a_fleet(3, 6, 1), follow=False)
    runner.run(2.0, 600)
    return replace(runner.state, samples=(), wishes=())


@cache
def capacities() -> tuple[float, ...]:
    return tuple(bears(s, k, TTFP) for s, k in zip(SPEC.stages, _ten_minutes().learned, strict=True))


def known_by_heart(reserve: float = 1.0, windows: float = MEMORY_WINDOWS, judged: float = 300.0) -> State:
    """Of an operator that has seen a day of it."""
    return replace(_ten_minutes(), staffing=tuple(Staffing(c, windows, reserve, judged) for c in capacities()))


def a_runner(*counts: int, tuning: Tuning | None = None, state: State | None = None, **spec: object) -> Runner:
    wanted = a_spec(tuning=tuning or Tuning(), **spec)
    return Runner(wanted, a_fleet(*counts), state=state or known_by_heart())


def needed(rate: float, reserve: float = 1.0) -> tuple[int, ...]:
    loads = [rate / c for c in capacities()]
    return tuple(max(1, math.ceil(a + reserve * math.sqrt(a))) for a in loads)


def test_counts_follow_the_root_of_the_load() -> None:
    runner = a_runner(1, 1, 1)
    for _ in range(3):  # beyond the noise of the first window
        decision = runner.step(4.0)
    planned = [dict(decision.inputs)[f"{n}.planned_per_second"] for n in NAMES]
    assert counts_of(decision) == tuple(
        math.ceil(p / c + s.reserve * math.sqrt(p / c))
        for p, c, s in zip(planned, capacities(), runner.state.staffing, strict=True)
    )


def test_until_it_is_known_the_model_decides() -> None:
    less, more = (a_runner(1, 1, 1, state=known_by_heart(3.0, w, 0.0)).step(4.0) for w in (TAKES_OVER - 2, TAKES_OVER))
    assert sum(counts_of(more)) > sum(counts_of(less))
    other = a_runner(1, 1, 1, state=known_by_heart(0.5, TAKES_OVER - 2, 0.0)).step(4.0)
    assert counts_of(other) == counts_of(less), "the reserve has no say yet"


def test_it_is_known_after_twenty_five_minutes_of_requests() -> None:
    runner = Runner(SPEC, a_fleet(3, 6, 1), follow=False)
    runner.run(2.0, 15 * (TAKES_OVER - 1))
    assert not any(s.known for s in runner.state.staffing)
    runner.run(0.0, 150)
    assert not any(s.known for s in runner.state.staffing), "an idle hour teaches nothing"
    runner.run(2.0, 30)
    assert all(s.known for s in runner.state.staffing)
    assert all(s.reserve == pytest.approx(START_RESERVE, abs=0.2) for s in runner.state.staffing)


def test_without_a_promise_on_ttfp_it_has_no_say() -> None:
    objectives = Objectives(None, 0.8, 4)
    few, many = (
        a_runner(1, 1, 1, objectives=objectives, state=known_by_heart(reserve)).step(4.0) for reserve in (0.0, 5.0)
    )
    assert counts_of(few) == counts_of(many)


def test_a_count_that_somebody_else_owns_does_not_hold_the_others_back() -> None:
    """One thinker is too few by the law; the talker still gets what it needs."""
    runner = a_runner(1, 1, 1, thinker={"fixed": True})
    assert needed(2.5)[0] > 1
    decision = runner.step(2.5)
    assert decision.reason != "Limited" and decision.target("thinker") == 1
    assert decision.target("talker") >= needed(2.5)[1]


# ------------------------------------------------------------------------------------------ what a replica bears


def known(**more: float) -> Learned:
    return replace(Learned(weight=50.0, b=250.0, t=50 * 0.0245, bb=1300.0, bt=50 * 0.0245 * 5.2), **more)


def test_what_a_replica_bears_ends_where_the_first_of_three_limits_is() -> None:
    stage = a_stage(1)
    free = bears(stage, known(work=100.0, first=1.0), 60.0)
    slots = bears(replace(stage, slots=8), known(work=100.0, first=1.0), 60.0)
    slow = bears(stage, known(work=100.0, first=1.0, wait=0.05), 1.2)
    busy = bears(stage, known(work=100.0, first=20.0), 60.0)
    assert max(slots, slow, busy) < free
    assert busy < bears(stage, known(work=100.0, first=10.0), 60.0)
    assert slow < bears(stage, known(work=100.0, first=1.0, wait=0.05), 1.5)
    assert bears(stage, known(work=200.0, first=1.0), 60.0) == pytest.approx(free / 2, rel=0.01)
    held = bears(stage, known(work=100.0, first=1.0, done=10.0, held=100.0, busy=1.0), 60.0)
    assert held < free, "who holds a slot without computing takes it all the same"


def test_it_is_averaged_over_hours_and_starts_anew_in_another_world() -> None:
    fleet = a_fleet(3, 6, 1)
    before = tuple(Staffing(c, MEMORY_WINDOWS, 1.0) for c in capacities())
    learned = known_by_heart().learned
    window = a_window(SPEC, fleet, 2.0, now=15.0)
    real = bears(SPEC.stages[1], learned[1], TTFP)
    near = tuple(replace(s, capacity=real * 1.5) for s in before)
    after = staffed(SPEC, window, fleet, learned, near, SMOOTH, by_law=True)
    assert real < after[1].capacity < real * 1.5 and after[1].capacity == pytest.approx(real * 1.5, rel=0.01)
    again = tuple(replace(s, capacity=real * 5, judged=1.0) for s in before)
    for _ in range(math.ceil(CHANGED_WINDOWS)):
        assert again[1].windows == MEMORY_WINDOWS and again[1].capacity > real * 4, (
            "a few long prompts are no other world"
        )
        again = staffed(SPEC, window, fleet, learned, again, SMOOTH, by_law=True)
    assert again[1].windows == 1.0 and again[1].capacity == pytest.approx(real)
    assert again[1].known, "the reserve still is: the law goes on with the new average"
    assert not replace(again[1], judged=0.0).known


def test_what_few_requests_show_at_night_does_not_move_what_noon_needs() -> None:
    """An hour at a tenth of the usual load weighs as much as six minutes of it."""
    fleet, learned = a_fleet(3, 6, 1), known_by_heart().learned
    real = bears(SPEC.stages[1], learned[1], TTFP)
    usual = tuple(Staffing(real * 1.5, MEMORY_WINDOWS, 1.0, 5000.0, usual=2.0, watched=5760.0) for _ in NAMES)
    moved = []
    for rate, windows in ((0.2, 240), (2.0, 24)):
        late = waited(
            a_window(SPEC, fleet, rate, now=15.0), {"talker": 4.0}, late=round(15 * rate), of=round(15 * rate)
        )
        law = usual
        for _ in range(windows):
            law = staffed(SPEC, late, fleet, learned, law, SMOOTH, by_law=True)
        moved.append((real * 1.5 - law[1].capacity, max(s.reserve for s in law) - 1.0))
    (night, night_reserve), (noon, noon_reserve) = moved
    assert night == pytest.approx(noon, rel=0.2) and noon > 0
    assert 0 < night_reserve < noon_reserve, "few requests in a window prove less, too"


def test_bursts_with_gaps_are_the_model_s_and_teach_no_reserve() -> None:
    """Whoever is late in a burst of azure_code says nothing of what independent users need."""
    runner = a_runner(3, 6, 1)
    before = runner.state.staffing
    for minute in range(24):
        for _ in range(4):
            runner.step(0.0 if minute % 3 else 4.0)
    taught = runner.state.staffing
    for _ in range(4):
        runner.step(4.0)
    assert runner.state.staffing != before
    assert [s.reserve for s in runner.state.staffing] == [s.reserve for s in taught]


def test_a_few_bursts_in_a_quiet_night_leave_the_law_in_charge() -> None:
    """A model that keeps capacity for bursts kept it for an hour after each of them."""
    runner = a_runner(3, 6, 1)
    runner.run(4.0, 3600)
    for minute in range(45):
        for _ in range(4):
            runner.step(0.0 if minute % 5 else 1.5)
    assert all(comes_in_bursts(runner.state.samples, i, SPEC.tuning) for i in range(len(NAMES)))
    assert not any(s.in_bursts for s in runner.state.staffing) and is_staffed(SPEC, runner.state)


# ------------------------------------------------------------------------------------------ the reserve


def waited(window: Window, shares: Mapping[str, float], *, late: int, of: int) -> Window:
    """The window, with `late` of its requests late and `shares`: seconds of TTFP that each waited for a stage's engine."""
    stages = tuple(
        replace(s, queue=seconds_of([shares[s.name]] * of)) if s.name in shares else s for s in window.stages
    )
    return replace(window, stages=stages, ttfp=seconds_of([4.0] * late + [0.4] * (of - late)))


def judged(late: int, of: int = 30, thinker: float = 0.02, talker: float = 0.05) -> tuple[float, ...]:
    """How the reserves move in a window of which `late` are late; the others: the slow ones' shares of TTFP."""
    fleet = a_fleet(3, 6, 1)
    state = known_by_heart()
    window = waited(a_window(SPEC, fleet, 2.0, now=15.0), {"thinker": thinker, "talker": talker}, late=late, of=of)
    after = staffed(SPEC, window, fleet, state.learned, state.staffing, SMOOTH, by_law=True)
    return tuple(a.reserve - b.reserve for a, b in zip(after, state.staffing, strict=True))


def test_the_reserve_of_the_stage_to_blame_grows_and_all_others_fall() -> None:
    assert [x > 0 for x in judged(10, thinker=4.0)] == [True, False, False]
    assert [x > 0 for x in judged(10, talker=4.0)] == [False, True, False]
    calm = judged(0)
    assert max(calm) < 0, "who is never late has too much"
    # Lateness where replicas are dear, and where many share the load, is dearer to avoid.
    assert calm[0] < calm[2] and calm[1] < calm[2]


def test_a_prompt_that_is_as_slow_on_an_empty_replica_blames_nobody() -> None:
    """More replicas take away what a batch adds and what waits, and no second of a long prompt."""
    state, moved = known_by_heart(), []
    for replicas in (3, 300):
        fleet = a_fleet(replicas, 6, 1)
        window = waited(a_window(SPEC, fleet, 2.0, now=15.0), {"talker": 0.5}, late=10, of=30)
        slow = replace(window.stages[0], compute=seconds_of([9.0] * 30), in_flight=12.0)
        window = replace(window, stages=(slow, *window.stages[1:]))
        after = staffed(SPEC, window, fleet, state.learned, state.staffing, SMOOTH, by_law=True)
        moved.append([a.reserve - b.reserve for a, b in zip(after, state.staffing, strict=True)])
    crowded, empty = moved
    assert crowded[0] > empty[0] < 0
    assert empty[1] > crowded[1] and empty[1] > 0, "who waits for the talker is the talker's"


def test_as_many_late_ones_as_are_aimed_at_change_nothing_as_a_whole() -> None:
    of = 1000
    moved = judged(round(AIMED_LATE * of), of, thinker=4.0, talker=4.0)
    assert sum(moved) == pytest.approx(0.0, abs=2e-3)


def test_one_window_moves_little_and_the_reserve_has_ends() -> None:
    assert max(judged(30, thinker=9.0)) < 0.2
    state, fleet = known_by_heart(0.01), a_fleet(3, 6, 1)
    law = state.staffing
    for _ in range(60):
        law = staffed(SPEC, a_window(SPEC, fleet, 2.0, now=15.0), fleet, state.learned, law, SMOOTH, by_law=True)
    assert all(s.reserve == RESERVE_RANGE[0] for s in law)


def test_nothing_is_judged_by_half_of_the_data() -> None:
    runner = a_runner(3, 6, 1)
    before = runner.state.staffing
    runner.step(2.0, freshness=Freshness.PARTIAL)
    runner.step(2.0, freshness=Freshness.STALE)
    assert runner.state.staffing == before


def test_an_objective_that_is_gravely_missed_is_answered_at_once() -> None:
    """T30: whatever the law takes for enough, one replica at a time."""
    counts = []
    for late in (4, 14):
        runner = a_runner(3, 6, 1)
        runner.step(1.0)
        window = a_window(SPEC, runner.fleet, 1.0, now=30.0)
        runner.now = 30.0
        counts.append(sum(counts_of(runner.show(replace(window, ttfp=seconds_of([4.0] * late + [0.4] * (15 - late)))))))
    assert counts == [10, 11], "a few late ones are what the reserve is there for"


# ------------------------------------------------------------------------------------------ what always holds


@settings(max_examples=25, deadline=None)
@given(st.floats(0.0, 30.0), st.floats(1.0, 4.0), st.floats(0.0, 5.0), st.integers(1, 30), st.floats(0.2, 1.0))
def test_more_load_strains_more_and_more_replicas_less(
    load: float, more: float, reserve: float, count: int, share: float
) -> None:
    def strain(at: float, n: int, served: float = 1.0) -> float:
        seen = StageLoad(
            a_stage(1), Fit(0.016, 0.0017), 0.0, 0.0, 5.0, 0.0, 0.0, 1.0, 1, 40, 32.0, staffed=at, reserve=reserve
        )
        return evaluate(seen, (n,), Goal(None, None, 1.64), served).strain

    assert strain(load * more, count) >= strain(load, count) >= strain(load, count + 1)
    assert strain(load, count, share) <= strain(load, count)


@settings(max_examples=15, deadline=None)
@given(
    st.tuples(*(st.integers(1, 12) for _ in NAMES)),
    st.floats(0.0, 5.0),
    st.none() | st.integers(8, 40),
    st.lists(st.tuples(st.floats(0.0, 20.0), st.sampled_from(list(Freshness))), min_size=1, max_size=10),
)
def test_bounds_budget_and_missing_data_hold_as_ever(
    start: tuple[int, int, int], reserve: float, budget: int | None, history: list[tuple[float, Freshness]]
) -> None:
    """T27."""
    used = sum(n * s.devices for n, s in zip(start, SPEC.stages, strict=True))
    budget = None if budget is None else max(budget, used)
    runner = a_runner(*start, state=known_by_heart(reserve), budget=budget)
    before = start
    for rate, freshness in history:
        decision = runner.step(rate, freshness=freshness)
        assert all(s.minimum <= n <= s.maximum for s, n in zip(runner.spec.stages, counts_of(decision), strict=True))
        assert budget is None or decision.devices <= budget
        if freshness is not Freshness.FRESH:
            assert all(b >= a for a, b in zip(before, counts_of(decision), strict=True))
        before = counts_of(decision)  # type: ignore[assignment]


@settings(max_examples=4, deadline=None)
@given(st.floats(0.3, 8.0), st.integers(0, 10_000))
def test_noise_of_five_percent_turns_no_stage_twice_in_ten_minutes(rate: float, seed: int) -> None:
    """T24: after a quarter of an hour, in which the scaler finds its level."""
    numbers = random.Random(seed)
    runner = a_runner(3, 6, 1)
    runner.run(rate, 900)
    moves: dict[str, list[tuple[float, int]]] = {n: [] for n in NAMES}
    for _ in range(80):
        for s in runner.step(rate * numbers.uniform(0.95, 1.05)).changes:
            moves[s.name].append((runner.now, 1 if s.target > s.current else -1))
    for changes in moves.values():
        turns = [at for (_, a), (at, b) in itertools.pairwise(changes) if a != b]
        assert all(later - first > 600 for first, later in itertools.pairwise(turns))


def test_the_margin_is_what_shrinking_needs() -> None:
    """T36: where the law decides, the knob is a margin of load."""
    counts = []
    for margin in (0.3, 1.0):
        runner = a_runner(12, 18, 6, tuning=Tuning(margin=margin))
        runner.run(3.0, 1500)
        counts.append(sum(runner.counts))
    assert counts[0] > counts[1]


def test_it_survives_a_restart() -> None:
    noon = datetime(2026, 6, 1, 12, tzinfo=UTC)
    state = known_by_heart(1.7)
    state = replace(state, staffing=tuple(replace(s, usual=2.5, watched=700.0, bursty=0.3) for s in state.staffing))
    kept = saved(SPEC, state, 600.0, noon)
    assert kept is not None
    found = restored(SPEC, kept.model_dump(by_alias=True, mode="json"), 0.0, noon + timedelta(minutes=1)).state
    assert found is not None
    for was, now in zip(state.staffing, found.staffing, strict=True):
        assert now.known and now.capacity == pytest.approx(was.capacity, rel=1e-3)
        assert now.reserve == pytest.approx(was.reserve, abs=1e-3)
        assert now.judged < was.judged, "the first windows of a new process count more again"
        assert (now.usual, now.watched, now.bursty) == pytest.approx((was.usual, was.watched, was.bursty), abs=1e-3)
