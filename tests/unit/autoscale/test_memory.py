"""What was learned survives a restart: the same figures come back, and nothing else that somebody may have written."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.autoscale_sim.restart import half_hour
from benchmarks.autoscale_sim.runs import EARLIER_SEED, learned_before, run
from omni_crds.v1alpha1.learned import LEARNED_VERSION, LearnedCapacity
from omni_operator.autoscale.capacity import cold_start, fit, idle_seconds, tails
from omni_operator.autoscale.memory import FIRST_WRITE_SECONDS, RESTORED_WINDOWS, WRITE_SECONDS, is_due, restored, saved
from omni_operator.autoscale.types import Spec
from omni_operator.autoscale.view import State
from omni_operator.cli.scaling import explained

from .builders import NAMES, Runner, a_fleet, a_spec, seconds_of

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def facts(spec: Spec, *names: str) -> Spec:
    return replace(spec, stages=tuple(replace(s, facts=f) for s, f in zip(spec.stages, names, strict=True)))


SPEC = facts(a_spec(), "aa", "bb", "cc")


def a_day(spec: Spec = SPEC) -> Runner:
    """Slower by half than the priors say, with a batch that varies."""
    runner = Runner(spec, a_fleet(2, 5, 1))
    for rate in (1.0, 2.0, 3.0, 2.0, 1.0, 2.5):
        runner.run(rate, 150, slow={"talker": 1.5})
    return runner


def kept(runner: Runner, at: datetime = NOON) -> dict[str, Any]:
    found = saved(runner.spec, runner.state, runner.now, at)
    assert found is not None
    return found.model_dump(by_alias=True, mode="json")


@cache
def _day() -> str:
    return json.dumps(kept(a_day()))


def a_days_memory() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_day())
    return found


def back(raw: object, *, spec: Spec = SPEC, later: float = 60.0, now: float = 0.0) -> State:
    found = restored(spec, raw, now, NOON + timedelta(seconds=later))
    assert found.state is not None, found.ignored
    return found.state


def test_what_was_learned_comes_back() -> None:
    runner = a_day()
    state, was = back(kept(runner)), runner.state
    for i, stage in enumerate(SPEC.stages):
        known, before = state.learned[i], was.learned[i]
        mean = before.b / before.weight
        for batch in (0.5 * mean, mean, 2 * mean):
            # Less weight than it had: the prior's shape has more to say where the batch has not been.
            assert fit(known, stage.prior, stage.slots).step(batch) == pytest.approx(
                fit(before, stage.prior, stage.slots).step(batch), rel=0.1
            )
        for name in ("work", "first", "computing", "computing_spread", "healthy", "pace"):
            assert getattr(known, name) == pytest.approx(getattr(before, name), rel=1e-3, abs=1e-5), name
        assert idle_seconds(known) == pytest.approx(idle_seconds(before), rel=1e-3, abs=1e-5)
        assert cold_start(known, stage.prior) == pytest.approx(cold_start(before, stage.prior), abs=1)
        assert state.caution[i] == pytest.approx(was.caution[i], abs=1e-3)
    assert state.ratio == pytest.approx(was.ratio, abs=1e-3)
    assert tails(state.learned)[1].computing == pytest.approx(tails(was.learned)[1].computing, rel=1e-2)
    assert state.wishes == (), "nothing proves yet that fewer are enough"


def test_the_remembered_bursts_come_back_at_their_time() -> None:
    """Fifteen minutes of bursts, five minutes of silence of the operator: what is older than half an hour is gone."""
    runner = Runner(SPEC, a_fleet(4, 9, 1))
    for _ in range(5):
        runner.run(0.2, 120)
        runner.run(6.0, 60)
    raw = kept(runner)
    state = back(raw, later=300.0, now=runner.now + 300.0)
    total = sum(s.arrivals[1] for s in runner.state.samples)
    assert sum(s.arrivals[1] for s in state.samples) == pytest.approx(total, rel=0.02)
    assert state.samples[-1].end == pytest.approx(runner.now, abs=60)
    assert max(s.arrivals[1] / s.seconds for s in state.samples) == pytest.approx(6.0, rel=0.1)
    assert back(raw, later=3600.0, now=runner.now + 3600.0).samples == ()


def test_it_is_small() -> None:
    """An hour of bursts, the longest names, 16 stages would still be far below what a status may have."""
    found = saved(SPEC, a_day().state, 900.0, NOON)
    assert found is not None and len(found.model_dump_json(by_alias=True)) < 1500 * len(NAMES)


# ------------------------------------------------------------------------------------------ whom it is for


@pytest.mark.parametrize("changed", range(3))
def test_a_stage_that_has_changed_starts_from_its_prior_and_says_so(changed: int) -> None:
    raw = a_days_memory()
    names = ["aa", "bb", "cc"]
    names[changed] = "dd"
    found = restored(facts(SPEC, *names), raw, 0.0, NOON)
    assert found.state is not None
    assert [known.weight > 0 for known in found.state.learned] == [i != changed for i in range(3)]
    assert len(found.ignored) == 1 and found.ignored[0].startswith(f"{NAMES[changed]}: ")
    assert found.state.ratio == 1.0


def test_a_stage_that_changes_while_the_operator_runs_is_learned_anew() -> None:
    runner = a_day()
    runner.state = replace(runner.state, caution=(1.0, 3.0, 1.0))
    runner.spec = facts(SPEC, "aa", "dd", "cc")
    runner.step(2.0)
    weights = [known.weight for known in runner.state.learned]
    assert weights[1] == 1.0 and weights[0] > 5 < weights[2]
    assert runner.state.caution[1] == pytest.approx(1.0, abs=0.01)
    runner.step(2.0)
    assert runner.state.learned[1].weight > 1.5, "and only once"


def test_a_stage_that_is_gone_is_no_matter() -> None:
    raw = a_days_memory()
    raw["stages"][0]["name"] = "other"
    assert [known.weight > 0 for known in back(raw).learned] == [False, True, True]


# ------------------------------------------------------------------------------------------ how long, how much


def test_the_older_the_less_it_weighs_and_after_two_weeks_nothing() -> None:
    raw, day = a_days_memory(), 86_400.0
    weights = [back(raw, later=later).learned[1].weight for later in (0.0, day, 3 * day)]
    assert weights == pytest.approx([RESTORED_WINDOWS, RESTORED_WINDOWS / 2, RESTORED_WINDOWS / 8], rel=1e-3)
    found = restored(SPEC, raw, 0.0, NOON + timedelta(days=15))
    assert found.state is None and "older than 14 days" in found.ignored[0]
    found = restored(SPEC, raw, 0.0, NOON - timedelta(hours=1))
    assert found.state is None and "future" in found.ignored[0]


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_world_that_has_changed_wins_within_a_minute(factor: float) -> None:
    """Replicas are four times as fast or slow as when it was written: after four windows the model is within a third."""
    raw = a_days_memory()
    runner = Runner(SPEC, a_fleet(6, 18, 2), follow=False, state=back(raw))
    truth = Runner(SPEC, a_fleet(6, 18, 2), follow=False)
    for _ in range(4):
        runner.step(0.5, slow={"talker": 1.5 * factor})
    truth.run(0.5, 1200, slow={"talker": 1.5 * factor})
    stage = SPEC.stages[1]
    learned, real = (fit(r.state.learned[1], stage.prior, stage.slots).step(1.0) for r in (runner, truth))
    assert learned == pytest.approx(real, rel=0.33)


def test_nothing_shrinks_for_a_window_after_a_restart() -> None:
    runner = Runner(SPEC, a_fleet(8, 15, 3), state=back(a_days_memory()))
    runner.run(0.5, 285)
    assert runner.counts == (8, 15, 3)
    runner.run(0.5, 120)
    assert runner.counts < (8, 15, 3)


def test_it_is_written_with_other_writes_and_seldom_alone() -> None:
    runner = a_day()
    first = saved(SPEC, runner.state, runner.now, NOON)
    runner.run(3.0, 60, slow={"talker": 1.5})
    second = saved(SPEC, runner.state, runner.now, NOON)
    assert first is not None and second is not None and first != second
    assert is_due(None, first, FIRST_WRITE_SECONDS, written_anyway=False)
    assert not is_due(None, first, FIRST_WRITE_SECONDS - 1, written_anyway=False)
    assert not is_due(first, second, WRITE_SECONDS - 1, written_anyway=False)
    assert is_due(first, second, 0.0, written_anyway=True)
    assert not is_due(first, first, 10 * WRITE_SECONDS, written_anyway=False), "nothing new is no reason"
    assert is_due(first, second, WRITE_SECONDS, written_anyway=False)
    assert not is_due(first, None, WRITE_SECONDS, written_anyway=True)


def test_a_stage_of_which_little_was_seen_is_not_kept() -> None:
    runner = Runner(SPEC, a_fleet(1, 1, 1))
    assert saved(SPEC, runner.state, 0.0, NOON) is None
    runner.run(1.0, 45)
    assert saved(SPEC, runner.state, runner.now, NOON) is None
    runner.run(1.0, 60, audio=0.0)
    found = saved(SPEC, runner.state, runner.now, NOON)
    assert found is not None and [s.name for s in found.stages] == ["thinker"]


# ------------------------------------------------------------------------------------------ hostile content


def damaged(**changes: object) -> dict[str, Any]:
    raw = a_days_memory()
    raw["stages"][1] |= changes
    return raw


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("text", "does not parse"),
        ([], "does not parse"),
        ({}, "version None"),
        ({"version": LEARNED_VERSION + 1, "anything": [1]}, f"version {LEARNED_VERSION + 1}"),
        ({"version": LEARNED_VERSION}, "time"),
        ({"version": LEARNED_VERSION, "time": "2026-13-41T99:00:00Z", "stages": []}, "does not parse"),
        ({"version": LEARNED_VERSION, "time": "now"}, "time"),
        (damaged(stepNanoseconds=-1), "stepNanoseconds"),
        (damaged(stepNanoseconds=float("nan")), "stepNanoseconds"),
        (damaged(stepNanoseconds=10**400), "stepNanoseconds"),
        (damaged(windows="many"), "windows"),
        (damaged(arrivalsPerMinute=[1] * 10_000), "arrivalsPerMinute"),
        (damaged(coldStartSeconds={"a": 1}), "coldStartSeconds"),
    ],
)
def test_what_does_not_parse_is_ignored_with_a_reason(raw: object, said: str) -> None:
    found = restored(SPEC, raw, 0.0, NOON)
    assert found.state is None and said in found.ignored[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stepNanoseconds": 0}, "no step time"),
        ({"windows": 0}, "no step time"),
        ({"stepNanoseconds": 10**12}, "no step time"),
        ({"batchThousandths": 10**12}, "batch"),
        ({"waitingMicroseconds": 10**12}, "takes so long"),
        ({"paceNanoseconds": 10**12}, "takes so long"),
        ({"learnedFor": ""}, "have changed"),
    ],
)
def test_a_stage_that_makes_no_sense_is_ignored_alone(changes: dict[str, object], said: str) -> None:
    found = restored(SPEC, damaged(**changes), 0.0, NOON)
    assert found.state is not None and found.state.learned[0].weight > 0 == found.state.learned[1].weight
    assert said in found.ignored[0]


whole = st.integers(0, 10**12)
FIGURES = [
    name
    for name in a_days_memory()["stages"][0]
    if name not in ("name", "learnedFor", "coldStartSeconds", "arrivalsPerMinute", "windows", "requestsPerHour")
]


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIGURES), whole),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 10**6), max_size=20),
    st.lists(st.integers(0, 10**6), max_size=30),
    st.floats(0.0, 5.0),
)
def test_whatever_fits_the_schema_leads_to_counts_within_bounds(
    figures: dict[str, int], windows: int, cold: list[int], arrivals: list[int], rate: float
) -> None:
    raw = damaged(**figures, windows=windows, coldStartSeconds=cold, arrivalsPerMinute=arrivals)
    found = restored(SPEC, raw, 0.0, NOON)
    runner = Runner(SPEC, a_fleet(2, 5, 1), state=found.state or State())
    runner.run(rate, 60)
    assert all(s.minimum <= n <= s.maximum for s, n in zip(SPEC.stages, runner.counts, strict=True))


# ------------------------------------------------------------------------------------------ shown, and worth it


def test_explain_shows_what_a_replica_can_do() -> None:
    raw = a_days_memory()
    lines = list(explained({"metadata": {"name": "p"}, "status": {"learned": raw}}))
    talker = next(line for line in lines if line.strip().startswith("talker"))
    full = LearnedCapacity.model_validate(raw).stages[1].requests_per_hour / 3600
    assert f"{full:.2f} requests/s" in talker and "600 units a request" in talker
    assert not any("talker" in line for line in explained({"metadata": {"name": "p"}, "status": {"learned": "?"}}))


@pytest.mark.parametrize("seed", [7, pytest.param(8, marks=pytest.mark.long)])
def test_a_restart_in_the_middle_of_a_burst_costs_little(seed: int) -> None:
    """Of the half hour after it no more than 1.5 points of the requests and 10 % of the hours; without memory it is 2.5."""
    undisturbed, remembers = (half_hour("azure_code", seed, 1140.0, kind) for kind in ("undisturbed", "remembers"))
    assert remembers.attainment >= undisturbed.attainment - 0.015
    assert remembers.hours <= 1.1 * undisturbed.hours


def test_nobody_is_measured_on_the_day_that_he_has_learned_on() -> None:
    with pytest.raises(ValueError, match="learned on"):
        run("azure_conv", "ours_known", EARLIER_SEED)
    raw = learned_before("azure_conv")
    assert raw is not None and LearnedCapacity.model_validate_json(raw).version == LEARNED_VERSION


def test_a_histogram_of_the_builders_has_a_tail() -> None:
    """Else the round trip of the tails above would compare nothing with nothing."""
    assert (seconds_of([0.1] * 18 + [4.0] * 2).quantile(0.95) or 0) > 1
