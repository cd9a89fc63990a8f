"""/v1/responses through the official client."""

from __future__ import annotations

import asyncio
import base64
import io
import wave
from typing import Any

import pytest

from omni_runtime.protocol import control
from tests.unit.orchestrator.conftest import eventually
from tests.unit.orchestrator.fake_stage import thinker_script
from tests.unit.serving.conftest import Server, sse_events, submit_of


async def test_openai_client_whole(server: Server) -> None:
    thinker = await server.replica("thinker")
    response = await server.openai.responses.create(
        model="test-omni", input="Say hello", instructions="Be kind.", max_output_tokens=9, metadata={"a": "b"}
    )
    assert response.output_text == "Hello world."
    assert (response.status, response.object) == ("completed", "response")
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 4, 11)
    submit = await submit_of(thinker)
    assert submit.inputs["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Say hello"},
    ]
    assert submit.params["max_tokens"] == 9


async def test_openai_client_stream(server: Server) -> None:
    await server.replica("thinker")
    stream = await server.openai.responses.create(model="test-omni", input="Say hello", stream=True)
    events: list[Any] = [event async for event in stream]
    kinds = [e.type for e in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[4:-4] == ["response.output_text.delta"] * 4
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello world."
    assert events[-1].response.output_text == "Hello world."


async def test_audio_in_both_modes(server: Server) -> None:
    """An extension: OpenAI's events of audio, and a part of the message that holds the file."""
    await server.replicas()
    body = {"input": "hi", "modalities": ["text", "audio"]}
    content = (await server.http.post("/v1/responses", json=body)).json()["output"][0]["content"]
    assert [part["type"] for part in content] == ["output_text", "output_audio"]
    with wave.open(io.BytesIO(base64.b64decode(content[1]["data"]))) as file:
        assert file.getnframes() == 7_200
    events = sse_events((await server.http.post("/v1/responses", json={**body, "stream": True})).text)
    pcm = b"".join(base64.b64decode(e["delta"]) for e in events if e["type"] == "response.audio.delta")
    assert len(pcm) == 7_200 * 2
    assert events[-1]["type"] == "response.completed"


async def test_messages_with_parts(server: Server) -> None:
    thinker = await server.replica("thinker")
    image = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()
    audio = base64.b64encode(b"RIFF").decode()
    await server.openai.responses.create(
        model="test-omni",
        input=[
            {"role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},  # type: ignore[list-item]
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "what is this?"},
                    {"type": "input_image", "image_url": image, "detail": "auto"},
                    {"type": "input_audio", "input_audio": {"data": audio, "format": "wav"}},
                ],
            },
        ],
    )
    first, second = (await submit_of(thinker)).inputs["messages"]
    assert first == {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]}
    assert [part["type"] for part in second["content"]] == ["text", "image", "audio"]


async def test_a_cut_answer_is_incomplete(server: Server) -> None:
    await server.replica("thinker", script=thinker_script(["a"], finish="length"))
    response = await server.openai.responses.create(model="test-omni", input="x")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


async def test_an_error_inside_a_stream_is_a_failed_response(server: Server) -> None:
    def breaking(request: str) -> list[control.StageMessage]:
        return [control.ClientText(request, "Hel"), control.StageFailed(request, "EngineError", "boom")]

    await server.replica("thinker", script=breaking)
    stream = await server.openai.responses.create(model="test-omni", input="x", stream=True)
    last: Any = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert "boom" in last.response.error.message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({}, ["input", "missing"], id="no input"),
        pytest.param({"input": ""}, ["input"], id="empty"),
        pytest.param({"input": []}, ["input"], id="no messages"),
        pytest.param({"input": [{"role": "wizard", "content": "x"}]}, ["input[0]", "wizard"], id="role"),
        pytest.param({"input": [{"type": "function_call", "name": "f"}]}, ["input[0]", "function_call"], id="item"),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            ["input[0].content", "input_image"],
            id="part",
        ),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://10.0.0.1/x"}]}]},
            ["input[0].content[0]", "no host is allowed"],
            id="no fetching (R59, R60)",
        ),
        pytest.param(
            {"input": "x", "previous_response_id": "resp_1"}, ["previous_response_id", "not stored"], id="chained"
        ),
        pytest.param({"input": "x", "background": True}, ["background"], id="background"),
        pytest.param({"input": "x", "tools": [{}]}, ["tools"], id="tools"),
        pytest.param({"input": "x", "text": {"format": {"type": "json_object"}}}, ["text", "json_object"], id="json"),
        pytest.param({"input": "x", "max_output_tokens": 0}, ["max_output_tokens", "0"], id="max_output_tokens"),
        pytest.param({"input": "x", "temperature": 3}, ["temperature", "3"], id="temperature"),
        pytest.param(
            {"input": "x", "modalities": ["audio"], "stream": True, "audio": {"format": "mp3"}},
            ["audio.format", "cannot be streamed"],
            id="streamed mp3",
        ),
    ],
)
async def test_bad_requests_name_field_value_and_fix(server: Server, fields: dict[str, Any], words: list[str]) -> None:
    response = await server.http.post("/v1/responses", json=fields)
    assert response.status_code == 400
    for word in words:
        assert word in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("sent", [0, 1, 3, 5])
async def test_disconnect_aborts(server: Server, stream: bool, sent: int) -> None:
    """R16: after any number of outputs."""
    thinker = await server.replica("thinker", hold_after=sent)
    left = asyncio.Event()
    asking = asyncio.create_task(server.post_and_leave("/v1/responses", {"input": "x", "stream": stream}, left))
    await asyncio.wait_for(thinker.held.wait(), 5)
    left.set()
    await asking
    await eventually(lambda: server.orchestrator.unfinished == 0)
    assert server.bound == 0
    assert set(thinker.aborts.values()) == {"client_disconnect"}
