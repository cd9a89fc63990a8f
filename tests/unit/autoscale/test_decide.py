"""decide(): the table of situations that a scaler meets, each by the case that it answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omni_operator.autoscale.types import DeviceClass, Freshness, Limits, Objectives

from .builders import Runner, a_fleet, a_spec, a_window, counts_of, seconds_of


def test_more_load_than_the_replicas_stand_grows_what_is_needed_at_once() -> None:
    runner = Runner(a_spec(), a_fleet(1, 1, 1))
    decision = runner.step(3.0)
    assert decision.reason == "ScaleUp"
    assert decision.target("talker") > 1
    assert decision.limiting_stage == "talker"


def test_the_cheapest_set_is_found_over_all_stages_together() -> None:
    """A thinker takes two accelerators, a talker one: with room in TTFP it is the talker that gets the next one."""
    spec = a_spec(objectives=Objectives(ttfp_p95_seconds=0.9))
    decision = Runner(spec, a_fleet(1, 1, 1)).step(3.0)
    assert decision.target("talker") > decision.target("thinker")
    held = next(c for c in decision.candidates if c.label == "keep or grow")
    assert held.holds and held.devices == decision.devices


def test_pending_replicas_count_and_are_not_asked_for_again() -> None:
    """T23: one replica still carries everything, and what was asked for is starting."""
    runner = Runner(a_spec(), a_fleet(1, 1, 1), follow=False)
    grown = a_fleet(2, 6, 1, pending=(1, 5, 0))
    for _ in range(8):
        runner.now += 15
        decision = runner.show(a_window(runner.spec, a_fleet(1, 1, 1), 2.0, now=runner.now))
        runner.fleet = grown
    assert counts_of(decision) == (2, 6, 1)
    assert not decision.changes


def test_shrinks_only_after_the_whole_stabilisation_window() -> None:
    runner = Runner(a_spec(), a_fleet(6, 12, 3))
    runner.run(1.0, 285)
    assert runner.counts == (6, 12, 3)
    runner.run(1.0, 120)
    assert sum(runner.counts) < 21
    assert runner.run(1.0, 900).reason == "Steady"


def test_one_high_wish_within_the_window_keeps_the_count() -> None:
    runner = Runner(a_spec(), a_fleet(6, 12, 3))
    runner.run(1.0, 150)
    high = next(s.wanted for s in runner.step(5.0).stages if s.name == "talker")
    high = min(high, 12)
    assert runner.run(1.0, 240).target("talker") >= high > next(s.wanted for s in runner.run(1.0, 15).stages[1:2])


@pytest.mark.parametrize("freshness", [Freshness.ABSENT, Freshness.STALE])
def test_a_blind_scaler_holds_and_says_so(freshness: Freshness) -> None:
    """T27."""
    runner = Runner(a_spec(), a_fleet(3, 5, 2))
    decision = runner.run(0.0, 1200, freshness=freshness)
    assert counts_of(decision) == (3, 5, 2)
    assert decision.reason == "MetricsStale" and not decision.ready
    assert freshness.value in decision.message


@pytest.mark.parametrize("freshness", [Freshness.PARTIAL, Freshness.RESET])
def test_a_lower_bound_of_the_load_may_grow_but_never_shrink(freshness: Freshness) -> None:
    """T26, T27: some replicas have no series, or a counter went back."""
    runner = Runner(a_spec(), a_fleet(6, 12, 3))
    decision = runner.run(0.5, 1200, freshness=freshness)
    assert counts_of(decision) == (6, 12, 3)
    kept = next(s for s in decision.stages if s.name == "talker")
    assert freshness.value.lower() in kept.reason
    assert sum(counts_of(runner.step(30.0, freshness=freshness))) > 21


def test_after_a_blind_time_the_past_does_not_prove_slack() -> None:
    runner = Runner(a_spec(), a_fleet(6, 12, 3))
    runner.run(1.0, 270)
    runner.run(1.0, 60, freshness=Freshness.STALE)
    assert counts_of(runner.run(1.0, 240)) == (6, 12, 3)


def test_a_queue_that_nobody_feeds_and_nothing_drains_is_stuck_not_load() -> None:
    """T25."""
    runner = Runner(a_spec(), a_fleet(1, 1, 1))
    decision = runner.run(0.0, 120, waiting=50.0)
    assert decision.reason == "QueueStuck" and decision.stuck and not decision.ready
    assert counts_of(decision)[0] <= runner.decisions[2].target("thinker")


def test_idle_stages_go_to_zero_and_come_back_with_the_first_request() -> None:
    """T34."""
    runner = Runner(a_spec(minimum=0), a_fleet(1, 1, 1))
    runner.run(0.5, 60)
    decision = runner.run(0.0, 1200)
    assert runner.counts == (0, 0, 0)
    assert decision.reason in ("Steady", "ToZero")
    woken = runner.show(a_window(runner.spec, runner.fleet, 0.0, now=runner.now + 15, waiting=1.0))
    assert counts_of(woken) == (1, 1, 1) and woken.reason == "FromZero"


def test_text_traffic_lets_the_audio_stages_sleep_and_an_audio_request_wakes_them() -> None:
    runner = Runner(a_spec(minimum=0), a_fleet(1, 1, 1))
    runner.run(1.0, 1500, audio=0.0)
    assert runner.counts[0] >= 1 and runner.counts[1:] == (0, 0)
    assert counts_of(runner.step(1.0, audio=0.2))[1:] == (1, 1)


def test_a_stage_that_is_not_ours_is_counted_and_left_alone() -> None:
    spec = a_spec(talker={"fixed": True})
    decision = Runner(spec, a_fleet(1, 1, 1)).run(5.0, 120)
    assert decision.target("talker") == 1
    assert "not scaled here" in next(s.reason for s in decision.stages if s.name == "talker")


def test_what_the_budget_cannot_serve_is_shared_in_proportion_and_said() -> None:
    runner = Runner(a_spec(budget=8), a_fleet(1, 1, 1))
    decision = runner.run(30.0, 60)
    assert decision.devices <= 8 and decision.reason == "Limited" and "budget" in decision.message
    assert decision.target("talker") >= 2 and decision.target("thinker") >= 1


@pytest.mark.parametrize(
    ("limits", "said"),
    [(Limits(quota=6), "quota"), (Limits(fair_share=6), "fair share"), (Limits(placeable=6), "nodes")],
)
def test_quota_fair_share_and_nodes_limit_like_the_budget_and_are_named(limits: Limits, said: str) -> None:
    """T65."""
    decision = Runner(a_spec(), a_fleet(1, 1, 1), limits).run(30.0, 60)
    assert decision.devices <= 6 and said in decision.message


def test_no_stage_grows_beyond_what_a_capped_one_can_feed() -> None:
    """Ratio between stages: three thinkers feed so much; more talkers would idle."""
    free = Runner(a_spec(maximum=60), a_fleet(1, 1, 1)).run(12.0, 60)
    capped = Runner(a_spec(maximum=60, thinker={"maximum": 1}), a_fleet(1, 1, 1)).run(12.0, 60)
    assert free.target("thinker") > 1 and "maxReplicas" in capped.message
    assert capped.target("talker") < free.target("talker")


def test_a_full_budget_moves_an_accelerator_from_slack_to_need() -> None:
    """T38, T30: text traffic becomes audio traffic; thinkers give way to talkers without a larger budget."""
    runner = Runner(a_spec(budget=10), a_fleet(4, 1, 1))
    runner.run(2.0, 600, audio=0.0)
    runner.fleet = a_fleet(4, 1, 1)
    decision = runner.run(2.0, 300)
    assert decision.devices <= 10
    assert decision.target("talker") > 1 and decision.target("thinker") < 4


def test_the_cheaper_class_is_taken_where_it_serves_as_well() -> None:
    classes = (DeviceClass("h100", cost=4.0), DeviceClass("l40s", cost=1.0, speed=0.5))
    spec = a_spec(objectives=Objectives(ttfp_p95_seconds=3.0), talker={"classes": classes})
    decision = Runner(spec, a_fleet(1, 1, 1)).run(2.0, 30)
    chosen = dict(next(s.by_class for s in decision.stages if s.name == "talker"))
    assert chosen["l40s"] > 0 and chosen["h100"] == 0
    scarce = (classes[0], DeviceClass("l40s", cost=1.0, speed=0.5, available=1))
    spec = a_spec(objectives=Objectives(ttfp_p95_seconds=3.0), talker={"classes": scarce})
    decision = Runner(spec, a_fleet(1, 1, 1)).run(2.0, 30)
    chosen = dict(next(s.by_class for s in decision.stages if s.name == "talker"))
    assert chosen["l40s"] <= 1 and chosen["h100"] > 0


def test_a_growing_load_is_met_before_it_is_there() -> None:
    runner = Runner(a_spec(), a_fleet(2, 4, 1))
    for i in range(24):
        decision = runner.step(1.0 + i * 0.1)
    inputs = dict(decision.inputs)
    assert inputs["talker.planned_per_second"] > 3.3 > inputs["talker.requests_per_second"]
    assert any("growing" in s.reason for d in runner.decisions for s in d.stages)


def test_a_burst_is_answered_within_a_window() -> None:
    runner = Runner(a_spec(), a_fleet(1, 2, 1))
    runner.run(0.6, 300)
    decision = runner.step(8.0)
    assert decision.target("talker") >= 3
    assert any("burst" in s.reason for s in decision.stages)


def test_bursts_that_come_back_keep_their_capacity() -> None:
    runner = Runner(a_spec(), a_fleet(1, 1, 1))
    for _ in range(4):
        runner.run(0.2, 240)
        runner.run(8.0, 60)
    peak = runner.counts[1]
    runner.run(0.2, 600)
    assert runner.counts[1] >= peak - 1


def test_the_decision_can_be_read_without_the_code() -> None:
    decision = Runner(a_spec(), a_fleet(1, 1, 1)).step(3.0)
    inputs = dict(decision.inputs)
    assert inputs["talker.requests_per_second"] == pytest.approx(3.0)
    assert "talker 1 -> " in decision.message and decision.candidates


def test_who_waited_in_the_entry_is_late_because_of_the_stage_that_was_full() -> None:
    """T30: the queue is gone, its requests come late, and no stage's share has their waiting."""
    runner = Runner(a_spec(), a_fleet(2, 2, 2), follow=False)
    runner.run(0.5, 120)
    calm = a_window(runner.spec, runner.fleet, 0.5, now=runner.now + 15)
    full = tuple(replace(s, in_flight={"thinker": 3.0, "talker": 60.0, "code2wav": 4.0}[s.name]) for s in calm.stages)
    slower = tuple(replace(s, compute=seconds_of([0.3] * int(s.arrivals))) if s.name == "thinker" else s for s in full)
    runner.now += 15
    late = replace(calm, stages=slower, ttfp=seconds_of([6.0] * 8))
    assert runner.show(late).limiting_stage == "talker"
    assert runner.show(replace(late, ttfp=seconds_of([1.9] * 8), stages=tuple(
        replace(s, compute=seconds_of([1.8] * 8)) if s.name == "thinker" else s for s in full
    ))).limiting_stage == "thinker", "what its own share explains is its own doing"  # fmt: skip


def test_an_idle_pipeline_shrinks_though_its_objective_is_out_of_reach() -> None:
    runner = Runner(a_spec(objectives=Objectives(0.2, None, None)), a_fleet(3, 4, 2))
    runner.run(0.0, 3600)
    assert runner.counts == (1, 1, 1)
