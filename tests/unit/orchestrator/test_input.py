"""Text that a client sends in pieces, and requests that start at a later stage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from omni_runtime.errors import InputTimeout, InvalidRequest, ReplicaLost, StreamClosed
from omni_runtime.orchestrator.calls import Call
from omni_runtime.orchestrator.inputs import MAX_TEXT_CHARACTERS, TextInput
from omni_runtime.orchestrator.spec import build_request_spec
from omni_runtime.orchestrator.values import RequestId
from omni_runtime.serving.params import StageParams
from omni_runtime.topology.types import Modality, PayloadContract
from tests.unit.orchestrator.conftest import Rig, all_outputs, eventually
from tests.unit.orchestrator.fake_stage import FakeStage
from tests.unit.orchestrator.plans import a_plan

SPEECH = a_plan(first_edge=PayloadContract.TEXT_SEGMENTS)
AUDIO, TEXT = Modality.AUDIO, Modality.TEXT


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        rig = Rig(SPEECH, tmp_path / "curve", stack)
        await rig.start()
        yield rig


def a_speech_call(text: str = "", *, finished: bool = False, **changes: Any) -> Call:
    values: dict[str, Any] = {
        "modalities": frozenset({AUDIO}),
        "params": StageParams(modalities=("audio",)),
        "inputs": {"text": text, "finished": finished},
        "deadline_seconds": 10.0,
        "start_stage": "talker",
        **changes,
    }
    return Call(**values)


async def held_speech(rig: Rig) -> tuple[FakeStage, FakeStage]:
    """Talker and code2wav that start, and then wait for `go`."""
    return await rig.replica("talker", hold_after=1), await rig.replica("code2wav", hold_after=1)


async def test_a_start_stage_takes_text_and_nothing_before_it_runs(rig: Rig) -> None:
    thinker, talker, code2wav = await rig.replicas()
    assert await all_outputs(rig.orchestrator.submit(a_speech_call("Hello.", finished=True)))
    (submit,) = talker.submits.values()
    assert submit.inputs == {"text": "Hello.", "finished": True}
    assert submit.text_edge == "thinker->talker"
    assert submit.producers == ()
    assert next(iter(code2wav.submits.values())).inputs == {}
    assert not thinker.submits


async def test_speech_needs_no_thinker_at_all(rig: Rig) -> None:
    await rig.replica("talker")
    await rig.replica("code2wav")
    assert await all_outputs(rig.orchestrator.submit(a_speech_call("Hello.", finished=True)))


async def test_more_text_reaches_the_start_stage_in_order(rig: Rig) -> None:
    talker, code2wav = await held_speech(rig)
    handle = rig.orchestrator.submit(a_speech_call("One "))
    await talker.submitted.wait()
    handle.append("two ")
    handle.append("three.", finished=True)
    await eventually(lambda: len(talker.appends) == 2)
    assert [(a.seq, a.text, a.finished) for a in talker.appends] == [(1, "two ", False), (2, "three.", True)]
    talker.go.set()
    code2wav.go.set()
    assert await all_outputs(handle)
    handle.append("late")  # dropped: the request has ended (R4)


async def test_text_that_comes_while_queued_is_part_of_submit(rig: Rig) -> None:
    handle = rig.orchestrator.submit(a_speech_call("One "))
    handle.append("two")
    talker, code2wav = await held_speech(rig)
    await talker.submitted.wait()
    assert next(iter(talker.submits.values())).inputs == {"text": "One two", "finished": False}
    handle.append(".", finished=True)
    await eventually(lambda: talker.appends)
    assert talker.appends[0].seq == 1, "the stage counts from its Submit"
    talker.go.set()
    code2wav.go.set()
    assert await all_outputs(handle)


async def test_a_client_that_never_ends_its_input_loses_its_places(rig: Rig) -> None:
    talker, _ = await held_speech(rig)
    handle = rig.orchestrator.submit(a_speech_call("One ", input_deadline_seconds=0.2))
    await talker.submitted.wait()
    with pytest.raises(InputTimeout, match=r"no text came for 0\.2 s.*stage talker"):
        await all_outputs(handle)
    await eventually(lambda: rig.bound == 0)
    assert talker.aborts == {handle.request: "input deadline"}


async def test_each_piece_gives_the_client_time_again(rig: Rig) -> None:
    talker, code2wav = await held_speech(rig)
    handle = rig.orchestrator.submit(a_speech_call("0 ", input_deadline_seconds=0.4))
    for i in range(4):
        await asyncio.sleep(0.2)
        handle.append(f"{i} ")
    handle.append("end.", finished=True)
    await asyncio.sleep(0.5)  # the end is in: no deadline for the client any more
    talker.go.set()
    code2wav.go.set()
    assert await all_outputs(handle)


async def test_a_start_replica_that_is_gone_does_not_swallow_text(rig: Rig) -> None:
    """A piece that nobody received would leave the stage waiting for its deadline (R5)."""
    talker, _ = await held_speech(rig)
    handle = rig.orchestrator.submit(a_speech_call("One "))
    await talker.submitted.wait()
    await talker.kill()
    await asyncio.sleep(0.05)  # FIN
    handle.append("two.", finished=True)
    with pytest.raises(ReplicaLost, match=f"talker.*{talker.replica}"):
        await all_outputs(handle)


async def test_cancel_in_the_middle_of_the_input(rig: Rig) -> None:
    talker, _ = await held_speech(rig)
    handle = rig.orchestrator.submit(a_speech_call("One "))
    await talker.submitted.wait()
    handle.cancel("client_disconnect")
    handle.append("two")
    with pytest.raises(StreamClosed):
        await all_outputs(handle)
    await eventually(lambda: rig.orchestrator.unfinished == 0)
    assert talker.appends == []


async def test_a_thinker_gets_text_in_pieces_as_well(rig: Rig) -> None:
    thinker, *_ = await rig.replicas(thinker={"hold_after": 1})
    call = a_speech_call("What is ", start_stage=None, modalities=frozenset({TEXT}))
    handle = rig.orchestrator.submit(call)
    await thinker.submitted.wait()
    handle.append("love?", finished=True)
    await eventually(lambda: thinker.appends)
    assert next(iter(thinker.submits.values())).text_edge == ""
    thinker.go.set()
    assert await all_outputs(handle)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"start_stage": "singer"}, "'singer' is not in pipeline test-omni; use thinker", id="unknown"),
        pytest.param({"start_stage": "code2wav"}, "takes codec_frames of talker, not text", id="no text goes in"),
        pytest.param({"inputs": {"messages": []}}, "stage talker takes plain text, not messages", id="messages"),
        pytest.param({"inputs": {"text": 7}}, "int is not text", id="no text"),
        pytest.param({"inputs": {"text": "x" * (MAX_TEXT_CHARACTERS + 1)}}, "too many", id="too long"),
    ],
)
async def test_a_call_that_cannot_start_there_says_why(rig: Rig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        rig.orchestrator.submit(a_speech_call("Hi.", **changes))
    assert rig.orchestrator.unfinished == 0


def test_text_is_not_what_comes_after_the_talker() -> None:
    with pytest.raises(KeyError, match="emits"):
        build_request_spec(SPEECH, RequestId("r"), frozenset({TEXT}), start="talker")


def test_rows_of_a_thinker_cannot_be_replaced_by_text() -> None:
    with pytest.raises(InvalidRequest, match="takes thinker_hidden of thinker, not text; start at 'thinker'"):
        build_request_spec(a_plan(), RequestId("r"), frozenset({AUDIO}), start="talker")


def test_text_after_the_end_is_refused() -> None:
    text = TextInput("a", finished=True)
    with pytest.raises(InvalidRequest, match="after its end"):
        text.append(RequestId("r"), "b", finished=False)


async def test_messages_cannot_be_appended_to(rig: Rig) -> None:
    handle = rig.orchestrator.submit(
        a_speech_call(start_stage=None, inputs={"messages": [{"role": "user", "content": "hi"}]})
    )
    with pytest.raises(InvalidRequest, match="whole input"):
        handle.append("more")
