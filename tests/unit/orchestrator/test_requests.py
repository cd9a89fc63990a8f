"""Whole requests through real sockets: order, completion, abort at every point, losses."""

from __future__ import annotations

import asyncio
import struct

import pytest

from omni_runtime.errors import DeadlineExceeded, EngineError, QueueFull, ReplicaLost, StageUnavailable, StreamClosed
from omni_runtime.orchestrator.actions import Emit, EmitStageEnd
from omni_runtime.orchestrator.routing import round_robin
from omni_runtime.orchestrator.values import AudioPiece, CodesPiece, TextPiece
from omni_runtime.protocol import control
from tests.unit.orchestrator.conftest import Rig, a_call, all_outputs, eventually
from tests.unit.orchestrator.fake_stage import talker_script


async def test_text_and_audio_arrive_in_order_and_complete_together(rig: Rig) -> None:
    thinker, talker, code2wav = await rig.replicas()
    outputs = await all_outputs(rig.orchestrator.submit(a_call()))
    pieces = [o.piece for o in outputs if isinstance(o, Emit)]
    assert "".join(p.text for p in pieces if isinstance(p, TextPiece)) == "Hello world."
    levels = [struct.unpack("<f", p.pcm[:4])[0] for p in pieces if isinstance(p, AudioPiece)]
    assert levels == pytest.approx([0.1, 0.2, 0.3])
    assert {o.stage for o in outputs if isinstance(o, EmitStageEnd)} >= {"thinker", "code2wav"}
    await eventually(lambda: rig.bound == 0)
    request = next(iter(thinker.submits))
    assert thinker.submits[request].consumers == ("thinker->talker",)
    assert thinker.submits[request].inputs
    assert talker.submits[request].inputs == {}
    assert code2wav.submits[request].producers[0].replica == talker.replica


async def test_text_only_never_touches_talker_or_code2wav(rig: Rig) -> None:
    thinker, talker, code2wav = await rig.replicas()
    await all_outputs(rig.orchestrator.submit(a_call("text")))
    assert not talker.submits
    assert not code2wav.submits
    assert next(iter(thinker.submits.values())).consumers == ()


async def test_text_only_works_without_a_talker(rig: Rig) -> None:
    """R69 kind: a missing talker takes speech away, not text."""
    await rig.replica("thinker")
    outputs = await all_outputs(rig.orchestrator.submit(a_call("text")))
    assert any(isinstance(o, Emit) for o in outputs)


async def test_codes_are_complete_even_if_the_talker_ends_last(rig: Rig) -> None:
    _, talker, _ = await rig.replicas(talker={"hold_after": 1, "script": talker_script(5)})
    handle = rig.orchestrator.submit(a_call(codes=True))
    await talker.submitted.wait()
    asyncio.get_running_loop().call_later(0.1, talker.go.set)
    outputs = await all_outputs(handle)
    codes = [c for o in outputs if isinstance(o, Emit) and isinstance(o.piece, CodesPiece) for c in o.piece.codes]
    assert len(codes) == 5


@pytest.mark.parametrize("sent", range(5))
async def test_cancel_at_every_point_aborts_every_stage_once(rig: Rig, sent: int) -> None:
    """R11, R16: nothing runs on after the client has left."""
    fakes = await rig.replicas(**{s: {"hold_after": sent} for s in ("thinker", "talker", "code2wav")})
    handle = rig.orchestrator.submit(a_call())
    await asyncio.gather(*(f.submitted.wait() for f in fakes))
    handle.cancel("client_disconnect")
    with pytest.raises(StreamClosed):
        await all_outputs(handle)
    await eventually(lambda: rig.orchestrator.unfinished == 0)
    assert rig.bound == 0
    for fake in fakes:
        assert len(fake.aborts) == (1 if fake._running or fake.aborts else 0)
        assert not fake._running


async def test_cancel_while_queued_submits_nothing(rig: Rig) -> None:
    handle = rig.orchestrator.submit(a_call())
    handle.cancel("client_disconnect")
    thinker, _, _ = await rig.replicas()
    with pytest.raises(StreamClosed):
        await all_outputs(handle)
    assert not thinker.submits


async def test_a_lost_replica_fails_only_its_own_requests(rig: Rig) -> None:
    """T69, R34: the message names stage and replica; the other replica's request ends well."""
    await rig.replica("thinker")
    await rig.replica("code2wav")
    doomed = await rig.replica("talker", hold_after=0)
    first = rig.orchestrator.submit(a_call(codes=True))
    await doomed.submitted.wait()
    await rig.replica("talker")
    second = rig.orchestrator.submit(a_call())
    await doomed.kill()
    with pytest.raises(ReplicaLost, match=rf"talker.*{doomed.replica}"):
        await all_outputs(first)
    assert await all_outputs(second)


async def test_the_lost_replica_is_named_even_if_its_consumer_speaks_first(rig: Rig) -> None:
    """A connector notices a dead producer in milliseconds, we do in seconds."""
    _, talker, code2wav = await rig.replicas(**{s: {"hold_after": 0} for s in ("thinker", "talker", "code2wav")})
    handle = rig.orchestrator.submit(a_call())
    await asyncio.gather(talker.submitted.wait(), code2wav.submitted.wait())
    await talker.kill()
    await asyncio.sleep(0.05)  # FIN reaches the entry before the consumer's complaint, as it does for a killed process
    await code2wav.send(
        control.StageFailed(handle.request, "UpstreamLost", "talker->code2wav ended without its last chunk")
    )
    with pytest.raises(ReplicaLost, match=f"stage talker: replica {talker.replica}"):
        await all_outputs(handle)


async def test_a_silent_replica_is_lost_and_used_again_when_it_speaks(rig: Rig) -> None:
    """R35"""
    thinker = await rig.replica("thinker", hold_after=0)
    thinker.silent = True
    handle = rig.orchestrator.submit(a_call("text"))
    with pytest.raises(ReplicaLost, match="heartbeat"):
        await all_outputs(handle)
    thinker.silent, thinker.hold_after = False, None
    assert "hello first" in await asyncio.wait_for(thinker.refused.get(), 30)
    await thinker.hello()
    await eventually(lambda: rig.orchestrator.status().stages[0].live_replicas == 1)
    assert await all_outputs(rig.orchestrator.submit(a_call("text")))


async def test_a_restarted_container_does_not_inherit_requests(rig: Rig) -> None:
    """R37: the same pod uid, another process."""
    old = await rig.replica("thinker", hold_after=0, replica="pod-1")
    handle = rig.orchestrator.submit(a_call("text"))
    await old.submitted.wait()
    await rig.replica("thinker", replica="pod-1")
    with pytest.raises(ReplicaLost, match="restarted"):
        await all_outputs(handle)
    assert await all_outputs(rig.orchestrator.submit(a_call("text")))


async def test_a_reconnect_of_the_same_process_keeps_its_requests(rig: Rig) -> None:
    old = await rig.replica("thinker", hold_after=0, replica="pod-1", incarnation="i-1", reports_requests=False)
    handle = rig.orchestrator.submit(a_call("text"))
    await old.submitted.wait()
    request = next(iter(old.submits))
    again = await rig.replica("thinker", replica="pod-1", incarnation="i-1", reports_requests=False)
    await again.send(control.ClientText(request, "still here"))
    await again.send(control.StageFinished(request, "stop"))
    outputs = await all_outputs(handle)
    assert outputs[0].piece.text == "still here"


async def test_a_replica_that_forgot_a_request_fails_it(rig: Rig) -> None:
    """R6 kind: a terminal message that got lost must not become a 600 s wait."""
    thinker = await rig.replica("thinker", hold_after=0)
    handle = rig.orchestrator.submit(a_call("text"))
    await thinker.submitted.wait()
    for task in thinker._running.values():
        task.cancel()
    thinker._running.clear()
    with pytest.raises(ReplicaLost, match="no longer knows"):
        await all_outputs(handle)


async def test_a_stage_error_names_the_stage_and_stops_the_others(rig: Rig) -> None:
    """R8"""

    def failing(request: str) -> list[control.StageMessage]:
        return [control.StageStarted(request), control.StageFailed(request, "EngineError", "out of memory")]

    thinker, _, code2wav = await rig.replicas(
        thinker={"hold_after": 1}, talker={"script": failing}, code2wav={"hold_after": 0}
    )
    with pytest.raises(EngineError, match="stage talker: out of memory"):
        await all_outputs(rig.orchestrator.submit(a_call()))
    await eventually(lambda: thinker.aborts and code2wav.aborts)


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("out of memory", "stage talker: out of memory"),
        ("stage talker: out of memory", "stage talker: out of memory"),
        ("stage talker, edge a->b: broken", "stage talker, edge a->b: broken"),
        ("stage talkers: broken", "stage talker: stage talkers: broken"),
    ],
)
async def test_the_stage_that_failed_is_named_once(rig: Rig, told: str, shown: str) -> None:
    def failing(request: str) -> list[control.StageMessage]:
        return [control.StageFailed(request, "EngineError", told)]

    await rig.replicas(talker={"script": failing})
    with pytest.raises(EngineError) as raised:
        await all_outputs(rig.orchestrator.submit(a_call()))
    assert str(raised.value) == shown


async def test_late_messages_yield_nothing(rig: Rig) -> None:
    """R4: a chunk after the end cannot resurrect a request."""
    thinker = await rig.replica("thinker", hold_after=0, answers_aborts=False)
    handle = rig.orchestrator.submit(a_call("text"))
    await thinker.submitted.wait()
    request = next(iter(thinker.submits))
    handle.cancel("client_disconnect")
    await thinker.aborted.wait()
    await thinker.send(control.ClientText(request, "late"))
    await thinker.send(control.StageFinished(request, "stop"))
    with pytest.raises(StreamClosed):
        await all_outputs(handle)
    await eventually(lambda: rig.orchestrator.unfinished == 0)


async def test_an_unanswered_abort_gives_its_place_back(rig: Rig) -> None:
    thinker = await rig.replica("thinker", hold_after=0, answers_aborts=False, reports_requests=False)
    handle = rig.orchestrator.submit(a_call("text"))
    await thinker.submitted.wait()
    handle.cancel("client_disconnect")
    assert rig.bound == 1, "the place is the replica's until it answers, or its time is over"
    await eventually(lambda: rig.bound == 0)


async def test_deadline_names_what_hung(rig: Rig) -> None:
    """R5"""
    await rig.replicas(talker={"hold_after": 1})
    with pytest.raises(DeadlineExceeded, match="talker on replica"):
        await all_outputs(rig.orchestrator.submit(a_call(deadline=0.3, codes=True)))


async def test_queue_full_is_refused_at_once_with_a_retry_time(rig: Rig) -> None:
    for _ in range(rig.plan.entry.max_queue):
        rig.orchestrator.submit(a_call())
    with pytest.raises(QueueFull, match="limit 8") as caught:
        rig.orchestrator.submit(a_call())
    assert caught.value.retry_after_seconds >= 1  # type: ignore[attr-defined]


async def test_a_missing_stage_is_named_after_a_short_wait(rig: Rig) -> None:
    """T69"""
    await rig.replica("thinker")
    await rig.replica("code2wav")
    with pytest.raises(StageUnavailable, match="no live replica of stage talker"):
        await all_outputs(rig.orchestrator.submit(a_call()))


async def test_start_order_does_not_matter(rig: Rig) -> None:
    """T73: a request that came first runs when the stages come, in any order."""
    handle = rig.orchestrator.submit(a_call())
    for stage in ("code2wav", "thinker", "talker"):
        await rig.replica(stage)
    assert await all_outputs(handle)


async def test_a_draining_replica_finishes_and_gets_nothing_new(rig: Rig) -> None:
    """T44"""
    old = await rig.replica("thinker", hold_after=1)
    handle = rig.orchestrator.submit(a_call("text"))
    await old.submitted.wait()
    await old.leave()
    await eventually(lambda: rig.orchestrator.status().stages[0].live_replicas == 0)
    new = await rig.replica("thinker")
    await all_outputs(rig.orchestrator.submit(a_call("text")))
    assert len(new.submits) == 1
    old.go.set()
    assert await all_outputs(handle)


async def test_capacity_is_kept_and_the_queue_moves_on(rig: Rig) -> None:
    thinker = await rig.replica("thinker", capacity=2, hold_after=0)
    handles = [rig.orchestrator.submit(a_call("text")) for _ in range(5)]
    await eventually(lambda: len(thinker.submits) == 2)
    assert rig.orchestrator.status().waiting == 3
    thinker.go.set()
    for handle in handles:
        assert await all_outputs(handle)


async def test_speech_that_waits_does_not_hold_up_text(rig: Rig) -> None:
    await rig.replica("thinker")
    await rig.replica("code2wav")
    talker = await rig.replica("talker", capacity=1, hold_after=0)
    for _ in range(2):
        rig.orchestrator.submit(a_call())
    await talker.submitted.wait()
    assert await all_outputs(rig.orchestrator.submit(a_call("text")))


async def test_many_requests_over_three_talkers_stay_with_their_replica(rig: Rig) -> None:
    """T70, R39: audio of a request comes from one replica, bound once; nothing is lost or mixed."""
    thinker = await rig.replica("thinker", capacity=64)
    await rig.replica("code2wav", capacity=64)
    talkers = [await rig.replica("talker", capacity=64) for _ in range(3)]
    handles = []
    for _ in range(8):
        handles += [rig.orchestrator.submit(a_call()) for _ in range(6)]
        await asyncio.gather(*(all_outputs(h) for h in handles[-6:]))
    assert sorted(r for t in talkers for r in t.submits) == sorted(thinker.submits)
    assert all(len(t.submits) >= 8 for t in talkers)


async def test_round_robin_policy(rig: Rig) -> None:
    await rig.start(policy=round_robin)
    thinkers = [await rig.replica("thinker") for _ in range(3)]
    for _ in range(6):
        await all_outputs(rig.orchestrator.submit(a_call("text")))
    assert [len(t.submits) for t in thinkers] == [2, 2, 2]


async def test_drain_finishes_running_and_refuses_new(rig: Rig) -> None:
    thinker = await rig.replica("thinker", hold_after=1)
    handle = rig.orchestrator.submit(a_call("text"))
    await thinker.submitted.wait()
    draining = asyncio.create_task(rig.orchestrator.drain(5))
    await asyncio.sleep(0)
    with pytest.raises(StageUnavailable, match="shutting down"):
        rig.orchestrator.submit(a_call("text"))
    assert not rig.orchestrator.status().ready
    thinker.go.set()
    assert await all_outputs(handle)
    await asyncio.wait_for(draining, 2)


async def test_what_a_replica_says_at_once_arrives_in_order(rig: Rig) -> None:
    """One message with the pieces of two requests, and one that nobody knows between them."""
    thinker = await rig.replica("thinker", hold_after=0)
    handles = [rig.orchestrator.submit(a_call("text")) for _ in range(2)]
    await eventually(lambda: len(thinker.submits) == 2)
    said = [
        message
        for h in handles
        for message in (
            control.ClientText(h.request, "one "),
            control.ClientText("unknown", "nobody's"),
            control.ClientText(h.request, "two"),
            control.StageFinished(h.request, "stop"),
        )
    ]
    await thinker.send_together(said)
    for handle in handles:
        outputs = await all_outputs(handle)
        assert [o.piece.text for o in outputs if isinstance(o, Emit)] == ["one ", "two"]
