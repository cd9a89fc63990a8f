"""decide() in the simulator: whom it blames, what a step of load does, and the published rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.autoscale_sim.calibrate import TOLERANCE, calibration
from benchmarks.autoscale_sim.engine import Simulation
from benchmarks.autoscale_sim.entities import Request
from benchmarks.autoscale_sim.ours import Ours, spec_of
from benchmarks.autoscale_sim.policy import drive
from benchmarks.autoscale_sim.references import Foreseen, Told
from benchmarks.autoscale_sim.stack import ASYNC_OUTPUT, DOCUMENTED, STAGES, Server

# Three pipelines: the documented one, the optimised one, and one whose code2wav is as heavy as its talker.
HEAVY_END = replace(
    DOCUMENTED, servers=(Server(0.005, 0.0003, 64, 1, 90.0), DOCUMENTED.servers[1], Server(0.4, 0.05, 48, 1, 90.0))
)
PIPELINES = {"documented": DOCUMENTED, "optimised": ASYNC_OUTPUT, "heavy code2wav": HEAVY_END}
# A factor per stage that breaks the objective within a window; the faster a stack is, the larger.
SLOWED = {
    "documented": (12.0, 3.0, 25.0),
    "optimised": (40.0, 12.0, 100.0),
    "heavy code2wav": (8.0, 3.0, 8.0),
}


def even(rate: float, seconds: float, frames: int = 200) -> list[Request]:
    return [Request(i / rate, 100, 60, frames) for i in range(int(rate * seconds))]


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_slowed_stage_is_named_within_two_windows(pipeline: str, stage: str) -> None:
    """T30: whatever its usual share is. The knob makes its steps longer; decide() sees only what is measured."""
    stack = PIPELINES[pipeline]
    simulation = Simulation(stack, even(1.2, 420), (3, 4, 3), devices=64, seed=1)
    ours = Ours(spec_of(stack, 1.5, 64))
    slowed_at = 300.0
    simulation.call_at(
        slowed_at, lambda: simulation.slow_down(STAGES.index(stage), SLOWED[pipeline][STAGES.index(stage)])
    )
    drive(simulation, ours, 420.0)
    assert not any(d.reason == "ObjectiveMissed" for d in ours.decisions if 60 < d.at <= slowed_at)
    breached = [d for d in ours.decisions if d.at > slowed_at and "of its objective" in d.message]
    assert breached, "the slowed stage did not break the objective: the test's factor is too small"
    assert breached[0].at <= slowed_at + 3 * Ours.interval
    assert stage in [d.limiting_stage for d in breached[:2]]


def test_who_foresees_a_step_has_its_replicas_when_it_comes() -> None:
    requests = [r for r in even(5.0, 900) if r.arrived >= 600 or int(r.arrived * 5) % 25 == 0]
    ready = []
    for policy in (Told(), Foreseen(DOCUMENTED, requests)):
        simulation = Simulation(DOCUMENTED, requests, (1, 1, 1), devices=64, seed=1, cold=lambda stage, numbers: 90.0)
        drive(simulation, policy, 610.0)
        ready.append([sum(r.ready_at <= 610.0 for r in pool) for pool in simulation.pools])
    assert ready[0] == [1, 1, 1], "what a fifth of a request per second needs"
    assert ready[1] == [5, 8, 3]


def test_a_step_of_load_overshoots_by_at_most_one_replica() -> None:
    """T23: cold starts of five minutes; a doubled load is answered once."""
    requests = [r for r in even(4.0, 1800) if r.arrived >= 300 or int(r.arrived * 4) % 2 == 0]
    simulation = Simulation(DOCUMENTED, requests, (2, 3, 1), devices=64, seed=1, cold=lambda stage, numbers: 300.0)
    ours = Ours(spec_of(DOCUMENTED, 1.5, 64))
    drive(simulation, ours, 1800.0)
    talkers = [d.target("talker") for d in ours.decisions if d.at > 300]
    settled = ours.decisions[-1].target("talker")
    assert max(talkers) <= settled + 1


def test_no_stream_is_cut_when_replicas_leave() -> None:
    requests = even(2.0, 60)
    simulation = Simulation(DOCUMENTED, requests, (2, 4, 2), devices=64, seed=1)
    simulation.call_at(30.0, lambda: simulation.scale(1, 1))
    simulation.run(600.0)
    assert len(simulation.outcomes) == len(requests)


def test_the_rule_that_is_told_the_capacities_follows_the_rate_and_keeps_for_five_minutes() -> None:
    simulation = Simulation(DOCUMENTED, even(4.0, 240), (1, 1, 1), devices=64, seed=1)
    seen = []
    for when in (300.0, 520.0, 700.0):
        simulation.call_at(when, lambda: seen.append(list(simulation.targets)))
    drive(simulation, Told(), 720.0)
    assert seen == [[4, 7, 3], [4, 7, 3], [1, 1, 1]]


@pytest.mark.parametrize("reproduced", calibration(), ids=lambda r: r.row.name)
def test_the_published_rows_are_reproduced(reproduced) -> None:  # type: ignore[no-untyped-def]
    assert all(abs(error) <= TOLERANCE for error in reproduced.errors)


def test_a_run_is_the_same_twice() -> None:
    def run() -> tuple[float, float]:
        simulation = Simulation(DOCUMENTED, even(3.0, 200), (2, 2, 1), devices=32, seed=3)
        drive(simulation, Ours(spec_of(DOCUMENTED, 1.5, 32)), 300.0)
        return simulation.device_seconds, sum(o.ttfp for o in simulation.outcomes)

    assert run() == run()


def test_stacks_are_values() -> None:
    """They are shared by all runs."""
    with pytest.raises(AttributeError):
        DOCUMENTED.first_tokens = 3  # type: ignore[misc]
