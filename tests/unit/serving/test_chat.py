"""/v1/chat/completions as clients see it, through the official client and on the wire."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import wave
from typing import Any

import pytest

from omni_runtime.protocol import control
from tests.unit.orchestrator.conftest import eventually
from tests.unit.orchestrator.fake_stage import thinker_script
from tests.unit.serving.conftest import Server, sse_events, submit_of

BOTH = ["text", "audio"]


async def test_openai_client_whole_answer(server: Server) -> None:
    """R53: one choice with text and audio."""
    await server.replicas()
    answer = await server.openai.chat.completions.create(
        model="test-omni",
        messages=[{"role": "user", "content": "hi"}],
        modalities=["text", "audio"],
        audio={"format": "wav", "voice": "heart"},
        max_tokens=16,
    )
    assert len(answer.choices) == 1
    message = answer.choices[0].message
    assert message.content == "Hello world."
    assert message.audio is not None
    assert message.audio.transcript == "Hello world."
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (24_000, 1, 7_200)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


async def test_openai_client_stream(server: Server) -> None:
    """R51, R50: text and audio pieces by `modality`; one finish_reason, on the last modality; raw PCM."""
    await server.replicas()
    stream = await server.openai.chat.completions.create(
        model="test-omni",
        messages=[{"role": "user", "content": "hi"}],
        modalities=["text", "audio"],
        audio={"format": "pcm16", "voice": "alloy"},
        stream=True,
        stream_options={"include_usage": True},
    )
    text, pcm, finished, usage = "", b"", [], None
    async for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            modality = (chunk.model_extra or {})["modality"]
            if choice.finish_reason:
                finished.append((choice.finish_reason, modality))
            if choice.delta.content and modality == "text":
                text += choice.delta.content
            elif choice.delta.content:
                pcm += base64.b64decode(choice.delta.content)
    assert text == "Hello world."
    assert len(pcm) == 7_200 * 2
    assert struct.unpack("<h", pcm[:2])[0] == pytest.approx(0.1 * 32767, abs=1)
    assert finished == [("stop", "audio")]
    assert usage is not None
    assert usage.model_extra is not None
    assert usage.model_extra["audio_seconds"] == pytest.approx(0.3)


async def test_streamed_wav_has_one_header_with_streaming_sizes(server: Server) -> None:
    """R48, R50"""
    await server.replicas()
    response = await server.chat(modalities=BOTH, stream=True, audio={"format": "wav"})
    chunks = [e for e in sse_events(response.text) if e != "[DONE]" and e.get("modality") == "audio"]
    pieces = [
        base64.b64decode(c["choices"][0]["delta"]["content"]) for c in chunks if c["choices"][0]["delta"].get("content")
    ]
    assert pieces[0][:4] == b"RIFF"
    assert pieces[0][4:8] == pieces[0][40:44] == b"\xff\xff\xff\xff"
    assert all(b"RIFF" not in p for p in pieces[1:])
    assert sum(map(len, pieces)) == 44 + 7_200 * 2


async def test_stream_ends_with_done_and_text_only_has_no_audio(server: Server) -> None:
    await server.replica("thinker")
    response = await server.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    got = sse_events(response.text)
    assert got[-1] == "[DONE]"
    assert {e["modality"] for e in got[:-1]} == {"text"}
    assert [e["choices"][0]["finish_reason"] for e in got[:-1]].count("stop") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_whose_speech_has_no_frame(server: Server, stream: bool) -> None:
    """R23: a talker that ends at once (its first code ends the speech, or one token is too little to speak of)."""

    def silent(request: str) -> list[control.StageMessage]:
        return [control.StageStarted(request), control.StageFinished(request, "stop")]

    await server.replicas(talker={"script": silent}, code2wav={"script": silent})
    answer = await server.chat(modalities=BOTH, audio={"format": "wav"}, stream=stream, return_codec_codes=True)
    assert answer.status_code == 200
    if stream:
        *chunks, done = sse_events(answer.text)
        assert done == "[DONE]"
        assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "stop"
        assert not any(c["modality"] == "audio" and c["choices"][0]["delta"].get("content") for c in chunks)
        assert chunks[-1]["codec_codes"] == []
    else:
        body = answer.json()
        assert body["choices"][0]["message"]["content"] == "Hello world."
        assert body["codec_codes"] == []
        with wave.open(io.BytesIO(base64.b64decode(body["choices"][0]["message"]["audio"]["data"]))) as file:
            assert file.getframerate() == 24_000
            assert file.readframes(24_000) == bytes(2 * 1_200), "silence that players can open"


async def test_extensions_return_token_ids_and_codes(server: Server) -> None:
    await server.replicas()
    body = (await server.chat(modalities=BOTH, return_token_ids=True, return_codec_codes=True)).json()
    assert body["token_ids"] == [100, 101, 102, 103]
    assert body["codec_codes"] == [[0, 1], [1, 2], [2, 3], [3, 4]]
    stream = sse_events(
        (await server.chat(modalities=BOTH, return_token_ids=True, return_codec_codes=True, stream=True)).text
    )
    last = next(e for e in stream if e != "[DONE]" and e["choices"][0]["finish_reason"])
    assert last["token_ids"] == body["token_ids"]
    assert last["codec_codes"] == body["codec_codes"]


async def test_a_cut_answer_says_length(server: Server) -> None:
    await server.replicas(thinker={"script": thinker_script(["a"], finish="length")})
    assert (await server.chat(modalities=BOTH)).json()["choices"][0]["finish_reason"] == "length"


async def test_parameters_reach_every_stage_and_media_only_the_first(server: Server) -> None:
    thinker, talker, _ = await server.replicas()
    audio = base64.b64encode(b"RIFFdata").decode()
    image = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()
    content = [
        {"type": "text", "text": "what is this?"},
        {"type": "input_audio", "input_audio": {"data": audio, "format": "wav"}},
        {"type": "image_url", "image_url": {"url": image}},
    ]
    await server.chat(
        modalities=BOTH,
        messages=[{"role": "user", "content": content}],
        temperature=0.5,
        max_completion_tokens=9,
        seed=3,
        stop="END",
        audio={"voice": "heart"},
        talker_max_tokens=50,
    )
    submit = await submit_of(thinker)
    parts = submit.inputs["messages"][0]["content"]
    assert parts[1] == {"type": "audio", "data": b"RIFFdata", "format": "wav"}
    assert parts[2] == {"type": "image", "data": b"\x89PNG", "media_type": "image/png"}
    params = (await submit_of(talker)).params
    assert params == submit.params
    assert (params["temperature"], params["max_tokens"], params["seed"]) == (0.5, 9, 3)
    assert list(params["stop"]) == ["END"]
    assert (params["voice"], params["talker_max_tokens"]) == ("heart", 50)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"messages": []}, ["messages"], id="no messages"),
        pytest.param({"messages": [{"role": "wizard", "content": "x"}]}, ["messages[0].role", "wizard"], id="role"),
        pytest.param({"messages": [{"role": "user"}]}, ["messages[0]", "is empty"], id="empty message"),
        pytest.param({"temperature": 7}, ["temperature", "7", "less than or equal to 2"], id="temperature"),
        pytest.param({"max_tokens": 0}, ["max_tokens", "0"], id="max_tokens"),
        pytest.param({"max_tokens": "many"}, ["max_tokens", "many"], id="not a number"),
        pytest.param({"modalities": ["smell"]}, ["modalities[0]", "smell", "text"], id="modality"),
        pytest.param({"modalities": []}, ["modalities"], id="no modality"),
        pytest.param({"audio": {"format": "aac"}}, ["audio.format", "aac", "wav"], id="audio format"),
        pytest.param({"audio": {"voice": "../../etc/passwd"}}, ["audio.voice"], id="voice is no path (R58)"),
        pytest.param({"n": 2}, ["n", "one choice per request"], id="n"),
        pytest.param({"tools": [{}]}, ["tools", "leave the field out"], id="tools"),
        pytest.param({"return_codec_codes": True}, ["return_codec_codes", "modalities"], id="codes without audio"),
        pytest.param(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}],
                    }
                ]
            },
            [
                "messages[0].content[0].image_url.url",
                "URLs of this host are not fetched",
                "no host is allowed",
                "data:image",
            ],
            id="no fetching (R59, R60)",
        ),
        pytest.param(
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
                ]
            },
            ["only data:, http: and https: URLs are read"],
            id="no files",
        ),
        pytest.param(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}}],
                    }
                ]
            },
            ["messages[0].content[0].input_audio.data", "not base64"],
            id="bad base64",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
            ["messages[0].content[0]", "video", "text or audio or image"],
            id="a kind that the topology does not take",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "smell_url"}]}]},
            ["messages[0].content[0]", "video_url"],
            id="unknown part",
        ),
    ],
)
async def test_bad_requests_name_field_value_and_fix(server: Server, fields: dict[str, Any], words: list[str]) -> None:
    response = await server.chat(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"messages": [{"role": "user", "content": "\xff"}]}'])
async def test_bodies_that_are_no_json_object(server: Server, body: bytes) -> None:
    response = await server.http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert "body" in response.json()["error"]["message"]


async def test_unknown_model(server: Server) -> None:
    """R56"""
    response = await server.chat(model="gpt-x")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "test-omni" in response.json()["error"]["message"]


async def test_error_before_the_first_output_is_an_http_status(server: Server) -> None:
    response = await server.chat(stream=True)
    assert response.status_code == 503
    assert "stage thinker" in response.json()["error"]["message"]
    assert response.headers["retry-after"]


async def test_error_inside_a_stream_is_an_event_and_the_end(server: Server) -> None:
    def breaking(request: str) -> list[control.StageMessage]:
        return [control.ClientText(request, "Hel"), control.StageFailed(request, "EngineError", "boom")]

    await server.replica("thinker", script=breaking)
    got = sse_events((await server.chat(stream=True)).text)
    assert got[-1]["error"]["code"] == "EngineError"
    assert "boom" in got[-1]["error"]["message"]
    assert "[DONE]" not in got


async def test_queue_full_is_429_with_retry_after(server: Server) -> None:
    from tests.unit.orchestrator.conftest import a_call

    for _ in range(server.plan.entry.max_queue):
        server.orchestrator.submit(a_call())
    response = await server.chat()
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("sent", [0, 1, 2, 3, 4])
async def test_disconnect_aborts_everywhere(server: Server, stream: bool, sent: int) -> None:
    """R16, R15: after any number of outputs."""
    holds = {"thinker": sent, "talker": min(sent, 2), "code2wav": sent}
    fakes = await server.replicas(**{stage: {"hold_after": n} for stage, n in holds.items()})
    left = asyncio.Event()
    body = {"messages": [{"role": "user", "content": "hi"}], "modalities": BOTH, "stream": stream}
    asking = asyncio.create_task(server.post_and_leave("/v1/chat/completions", body, left))
    for fake in fakes:
        await asyncio.wait_for(fake.held.wait(), 5)
    left.set()
    await asking
    await eventually(lambda: server.orchestrator.unfinished == 0)
    assert server.bound == 0
    assert all(f.aborts for f in fakes)


async def test_request_id_is_returned_and_never_used_inside(server: Server) -> None:
    """R62: neither a path nor an id of ours."""
    thinker = await server.replica("thinker")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = await server.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "trace-7"})
    assert answer.headers["x-request-id"] == "trace-7"
    bad = await server.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "../../tmp/x"})
    assert bad.headers["x-request-id"] != "../../tmp/x"
    assert all(len(r) == 32 and r.isalnum() for r in thinker.submits)
