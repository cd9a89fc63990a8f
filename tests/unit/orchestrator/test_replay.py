"""A lost replica before the client has had anything: the request starts anew, and nothing of before mixes in."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from omni_runtime.errors import ReplicaLost, StageUnavailable, StreamClosed
from omni_runtime.orchestrator.actions import Emit, EmitStageEnd
from omni_runtime.orchestrator.admission import AdmissionRules
from omni_runtime.orchestrator.values import AudioPiece, TextPiece
from omni_runtime.protocol import control
from omni_runtime.topology.types import PayloadContract
from tests.unit.orchestrator.conftest import Rig, a_call, all_outputs, eventually
from tests.unit.orchestrator.fake_stage import FakeStage
from tests.unit.orchestrator.plans import a_plan
from tests.unit.orchestrator.test_input import a_speech_call


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        rig = Rig(a_plan(first_edge=PayloadContract.TEXT_SEGMENTS), tmp_path / "curve", stack)
        await rig.start(admission=AdmissionRules(8, unavailable_grace_seconds=0.3, replays=1))
        yield rig


@pytest.fixture
async def patient(tmp_path: Path) -> AsyncIterator[Rig]:
    """Waits for a stage for as long as a slow machine needs."""
    async with AsyncExitStack() as stack:
        rig = Rig(a_plan(first_edge=PayloadContract.TEXT_SEGMENTS), tmp_path / "curve", stack)
        await rig.start(admission=AdmissionRules(8, unavailable_grace_seconds=60.0, replays=1))
        yield rig


def text_of(outputs: list[object]) -> str:
    return "".join(o.piece.text for o in outputs if isinstance(o, Emit) and isinstance(o.piece, TextPiece))


async def test_a_request_that_lost_its_replica_starts_anew_on_another(rig: Rig) -> None:
    doomed = await rig.replica("thinker", hold_after=1)
    talker, code2wav = await rig.replica("talker", hold_after=1), await rig.replica("code2wav", hold_after=1)
    handle = rig.orchestrator.submit(a_call())
    await asyncio.gather(*(s.submitted.wait() for s in (doomed, talker, code2wav)))
    (first,) = doomed.submits
    await rig.replica("thinker")
    await doomed.kill()
    talker.hold_after = code2wav.hold_after = None
    outputs = await all_outputs(handle)
    assert text_of(outputs) == "Hello world."
    levels = [
        struct.unpack("<f", o.piece.pcm[:4])[0]
        for o in outputs
        if isinstance(o, Emit) and isinstance(o.piece, AudioPiece)
    ]
    assert levels == pytest.approx([0.1, 0.2, 0.3]), "every chunk once"
    ends = [o.stage for o in outputs if isinstance(o, EmitStageEnd)]
    assert len(ends) == len(set(ends)), "usage is not counted twice"
    assert talker.aborts.keys() == code2wav.aborts.keys() == {first}, "the first attempt was aborted where it still ran"
    assert len(talker.submits) == len(code2wav.submits) == 2
    await eventually(lambda: rig.bound == 0 and rig.orchestrator.unfinished == 0)


async def test_late_chunks_of_the_old_attempt_never_mix_in(rig: Rig) -> None:
    """R4, R26: the stage that did not hear the abort yet still sends under the old id."""
    doomed = await rig.replica("talker", hold_after=0)
    await rig.replica("thinker", hold_after=0)
    code2wav = await rig.replica("code2wav", hold_after=0, answers_aborts=False)
    handle = rig.orchestrator.submit(a_call("audio"))
    await asyncio.gather(doomed.submitted.wait(), code2wav.submitted.wait())
    (old,) = code2wav.submits
    await rig.replica("talker", hold_after=0)
    await doomed.kill()
    await eventually(lambda: len(code2wav.submits) == 2)
    (new,) = code2wav.submits.keys() - {old}
    await code2wav.send(control.ClientAudio(old, b"\0\0\0\0", 24_000, 1))
    await code2wav.send(control.StageFinished(old, "stop"))
    await code2wav.send(control.ClientAudio(new, struct.pack("<f", 0.5), 24_000, 1))
    await code2wav.send(control.StageFinished(new, "stop"))
    outputs = await all_outputs(handle)
    assert [o.piece.pcm for o in outputs if isinstance(o, Emit) and isinstance(o.piece, AudioPiece)] == [
        struct.pack("<f", 0.5)
    ]


async def test_after_the_first_output_a_loss_is_an_error(rig: Rig) -> None:
    doomed = await rig.replica("thinker", hold_after=2)
    handle = rig.orchestrator.submit(a_call("text"))
    outputs = handle.outputs()
    assert isinstance(await anext(outputs), Emit)
    await rig.replica("thinker")
    await doomed.kill()
    with pytest.raises(ReplicaLost, match=f"stage thinker: replica {doomed.replica}"):
        await anext(outputs)


async def test_replays_are_bounded_and_every_loss_is_told(rig: Rig) -> None:
    a = await rig.replica("thinker", hold_after=0)
    handle = rig.orchestrator.submit(a_call("text"))
    await a.submitted.wait()
    b = await rig.replica("thinker", hold_after=0)
    await a.kill()
    await b.submitted.wait()
    await rig.replica("thinker")
    await b.kill()
    with pytest.raises(ReplicaLost, match=f"{a.replica} .*the next attempt: .*{b.replica}"):
        await all_outputs(handle)


async def test_without_another_replica_the_client_hears_at_once_which_was_lost(rig: Rig) -> None:
    doomed = await rig.replica("thinker", hold_after=0)
    handle = rig.orchestrator.submit(a_call("text"))
    await doomed.submitted.wait()
    await doomed.kill()
    with pytest.raises(
        ReplicaLost, match=f"{doomed.replica}.*it could not start anew: .*no live replica of stage thinker"
    ):
        await all_outputs(handle)
    assert rig.orchestrator.unfinished == 0


async def test_a_restarted_container_gets_the_request_again(rig: Rig) -> None:
    """R37: the same pod uid, another process."""
    old = await rig.replica("thinker", hold_after=0, replica="pod-1")
    handle = rig.orchestrator.submit(a_call("text"))
    await old.submitted.wait()
    await rig.replica("thinker", replica="pod-1")
    assert text_of(await all_outputs(handle)) == "Hello world."


async def test_a_replica_that_drains_just_then_is_not_the_clients_problem(rig: Rig) -> None:
    """T44: Submit and Leaving cross."""

    def refusing(request: str) -> list[control.StageMessage]:
        return [control.StageFailed(request, "StageUnavailable", "the replica is draining")]

    leaving = await rig.replica("thinker", script=refusing, hold_after=0)
    handle = rig.orchestrator.submit(a_call("text"))
    await leaving.submitted.wait()
    await rig.replica("thinker")
    await leaving.leave()
    leaving.go.set()
    assert text_of(await all_outputs(handle)) == "Hello world."


async def without_sidecar(rig: Rig) -> FakeStage:
    """A thinker that still counts as live, and turns requests away."""

    def refusing(request: str) -> list[control.StageMessage]:
        stage.problem = "no connector sidecar"
        said = control.Heartbeat(control.StageLoad(), healthy=False, detail=stage.problem)
        return [said, control.StageFailed(request, "StageUnavailable", stage.problem)]

    stage = await rig.replica("thinker", script=refusing)
    return stage


async def test_a_stage_that_turns_a_request_away_for_a_moment_is_waited_for(patient: Rig) -> None:
    """R5: the sidecar of its pod was killed and is on its way back; /ready says what requests find."""
    stage = await without_sidecar(patient)
    handle = patient.orchestrator.submit(a_call("text"))
    await stage.submitted.wait()
    await eventually(lambda: "thinker" in patient.orchestrator.status().missing)
    assert len(stage.submits) == 1, "the second attempt waits"
    stage.script, stage.problem = None, ""
    assert text_of(await all_outputs(handle)) == "Hello world."


async def test_a_stage_that_does_not_come_back_is_an_error_that_says_so(rig: Rig) -> None:
    stage = await without_sidecar(rig)
    handle = rig.orchestrator.submit(a_call("text"))
    with pytest.raises(StageUnavailable, match="no connector sidecar"):
        await all_outputs(handle)
    assert len(stage.submits) == 1


async def test_cancel_reaches_the_present_attempt(rig: Rig) -> None:
    doomed = await rig.replica("thinker", hold_after=0)
    handle = rig.orchestrator.submit(a_call("text"))
    await doomed.submitted.wait()
    other = await rig.replica("thinker", hold_after=0)
    await doomed.kill()
    await other.submitted.wait()
    handle.cancel("client_disconnect")
    with pytest.raises(StreamClosed):
        await all_outputs(handle)
    await eventually(lambda: other.aborts)
    await eventually(lambda: rig.orchestrator.unfinished == 0)


async def test_text_in_pieces_is_all_there_again(rig: Rig) -> None:
    doomed = await rig.replica("talker", hold_after=0)
    code2wav = await rig.replica("code2wav", hold_after=0)
    handle = rig.orchestrator.submit(a_speech_call("One "))
    await doomed.submitted.wait()
    handle.append("two ")
    await eventually(lambda: doomed.appends)
    other = await rig.replica("talker", hold_after=0)
    await doomed.kill()
    await other.submitted.wait()
    (submit,) = other.submits.values()
    assert submit.inputs == {"text": "One two ", "finished": False}
    handle.append("three.", finished=True)
    await eventually(lambda: other.appends)
    assert (other.appends[0].seq, other.appends[0].request) == (1, submit.request)
    other.go.set()
    code2wav.go.set()
    assert await all_outputs(handle)
