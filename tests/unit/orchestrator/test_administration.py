"""Pause, resume, sleep and wake of a whole pipeline."""

from __future__ import annotations

import asyncio

import pytest

from omni_runtime.errors import Conflict, DeadlineExceeded
from tests.unit.orchestrator.conftest import Rig, a_call, all_outputs, eventually


async def test_in_pause_what_runs_goes_on_and_what_comes_waits(rig: Rig) -> None:
    thinker = await rig.replica("thinker", hold_after=1)
    running = rig.orchestrator.submit(a_call("text"))
    await thinker.submitted.wait()
    rig.orchestrator.administration.pause()
    waiting = rig.orchestrator.submit(a_call("text"))
    thinker.go.set()
    assert await all_outputs(running)
    await rig.replica("thinker")
    await asyncio.sleep(0.2)  # ticks, a new replica, a free place: nothing of it may start it
    assert (len(thinker.submits), rig.orchestrator.status().waiting) == (1, 1)
    assert rig.orchestrator.status().paused
    rig.orchestrator.administration.resume()
    assert await all_outputs(waiting)


async def test_a_deadline_ends_the_wait_in_a_pause(rig: Rig) -> None:
    await rig.replica("thinker")
    rig.orchestrator.administration.pause()
    with pytest.raises(DeadlineExceeded, match="still queued"):
        await all_outputs(rig.orchestrator.submit(a_call("text", deadline=0.2)))


async def test_a_pause_is_not_a_missing_stage(rig: Rig) -> None:
    rig.orchestrator.administration.pause()
    handle = rig.orchestrator.submit(a_call("text"))
    await asyncio.sleep(0.5)  # longer than a request waits for a stage without replicas
    await rig.replica("thinker")
    rig.orchestrator.administration.resume()
    assert await all_outputs(handle)


async def test_sleep_waits_for_what_runs_and_wake_up_serves_what_waited(rig: Rig) -> None:
    thinker, talker, _ = await rig.replicas(thinker={"hold_after": 1})
    running = rig.orchestrator.submit(a_call("text"))
    await thinker.submitted.wait()
    sleeping = asyncio.create_task(rig.orchestrator.administration.sleep(5))
    await asyncio.sleep(0.1)
    assert not sleeping.done()
    thinker.go.set()
    assert await all_outputs(running)
    changed = await sleeping
    assert {(c.stage, c.asleep, c.problem) for c in changed} == {
        (s, True, "") for s in ("thinker", "talker", "code2wav")
    }
    assert thinker.asleep
    assert talker.asleep
    assert {r.state for s in rig.orchestrator.status().stages for r in s.replicas} == {"Asleep"}
    waiting = rig.orchestrator.submit(a_call("text"))
    with pytest.raises(Conflict, match="3 replicas sleep .*use wakeup"):
        rig.orchestrator.administration.resume()
    woken = await rig.orchestrator.administration.wake_up(5)
    assert not any(c.asleep for c in woken)
    assert await all_outputs(waiting)


async def test_sleep_gives_up_if_requests_do_not_end(rig: Rig) -> None:
    thinker = await rig.replica("thinker", hold_after=1)
    running = rig.orchestrator.submit(a_call("text"))
    await thinker.submitted.wait()
    with pytest.raises(Conflict, match="1 requests still run after 0.1 s"):
        await rig.orchestrator.administration.sleep(0.1)
    assert not rig.orchestrator.status().paused, "as before"
    thinker.go.set()
    assert await all_outputs(running)


async def test_a_replica_that_cannot_sleep_or_does_not_answer_says_why(rig: Rig) -> None:
    thinker, talker, code2wav = await rig.replicas()
    talker.power_problem = "TalkerEngine has nothing that sleep would give back"
    code2wav.mute_power = True
    changed = {c.stage: c for c in await rig.orchestrator.administration.sleep(0.3)}
    assert (changed["thinker"].asleep, changed["thinker"].problem) == (True, "")
    assert (changed["talker"].asleep, changed["talker"].problem) == (False, talker.power_problem)
    assert changed["code2wav"].problem == "no answer within 0.3 s"
    assert rig.orchestrator.status().paused
    code2wav.mute_power, talker.power_problem = False, ""
    await rig.orchestrator.administration.wake_up(5)
    await eventually(lambda: not rig.orchestrator.status().paused)
    assert not thinker.asleep


async def test_a_pipeline_of_which_nothing_can_sleep_goes_on(rig: Rig) -> None:
    thinker = await rig.replica("thinker")
    thinker.power_problem = "no"
    await rig.orchestrator.administration.sleep(1)
    assert not rig.orchestrator.status().paused
    assert await all_outputs(rig.orchestrator.submit(a_call("text")))


async def test_a_replica_that_says_it_sleeps_gets_nothing(rig: Rig) -> None:
    """Another entry of the same pipeline may have put it to sleep."""
    thinker = await rig.replica("thinker")
    thinker.asleep = True
    await eventually(lambda: rig.orchestrator.status().stages[0].live_replicas == 0)
    thinker.asleep = False
    assert await all_outputs(rig.orchestrator.submit(a_call("text")))
