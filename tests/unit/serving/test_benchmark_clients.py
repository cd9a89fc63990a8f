"""The requests of the field's benchmark clients, as they send them, and the answers, as they read them."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

from omni_runtime.protocol import control
from tests.unit.serving.conftest import Server, sse_events

PNG = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()
WAV = base64.b64encode(b"RIFF").decode()


async def test_vllm_bench_chat_omni(server: Server) -> None:
    """Backend openai-chat-omni: usage with every text chunk counts tokens; every audio chunk is a WAV file (it is read
    with `wave`, one by one), as long as the client names no format."""
    await server.replicas()
    response = await server.http.post(
        "/v1/chat/completions",
        json={
            "model": "test-omni",
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": PNG}}],
                }
            ],
            "temperature": 0.0,
            "max_tokens": 16,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
            "modalities": ["text", "audio"],
        },
        headers={"authorization": "Bearer None", "x-request-id": "benchmark-serving-0"},
    )
    assert response.status_code == 200
    text, tokens, frames = "", [], 0
    for event in sse_events(response.text)[:-1]:
        for choice in event["choices"]:
            content = (choice.get("delta") or {}).get("content")
            if event["modality"] == "text" and content:
                text += content
                tokens.append(event["usage"]["completion_tokens"])
            elif event["modality"] == "audio" and content:
                with wave.open(io.BytesIO(base64.b64decode(content)), "rb") as file:
                    assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
                    frames += len(file.readframes(file.getnframes())) // 2
    assert text == "Hello world."
    assert tokens == [1, 2, 3, 4]
    assert frames == 7_200
    assert sse_events(response.text)[-2]["usage"]["completion_tokens"] == 4


async def test_vllm_bench_audio_speech(speaking: Server) -> None:
    """Backend openai-audio-speech: raw PCM, counted in bytes."""
    await speaking.replicas()
    response = await speaking.http.post(
        "/v1/audio/speech",
        json={
            "model": "test-omni",
            "input": "Good morning.",
            "stream": True,
            "stream_format": "audio",
            "response_format": "pcm",
        },
    )
    assert response.status_code == 200
    assert len(response.content) == 7_200 * 2


async def test_aiperf_chat(server: Server) -> None:
    """Multi-modal parts with ids of its own, the newer token field, usage at the end."""
    thinker = await server.replica("thinker")
    response = await server.http.post(
        "/v1/chat/completions",
        json={
            "messages": [
                {"role": "system", "content": "Be brief."},
                {
                    "role": "user",
                    "name": "user",
                    "content": [
                        {"type": "text", "text": "what is this?"},
                        {"type": "image_url", "image_url": {"url": PNG}, "uuid": "image-1"},
                        {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}},
                    ],
                },
            ],
            "model": "test-omni",
            "stream": True,
            "max_completion_tokens": 12,
            "stream_options": {"include_usage": True},
        },
    )
    events = sse_events(response.text)
    assert {e["object"] for e in events[:-1]} == {"chat.completion.chunk"}
    assert events[-2]["usage"]["total_tokens"] == 11
    (submit,) = thinker.submits.values()
    assert [p["type"] for p in submit.inputs["messages"][1]["content"]] == ["text", "image", "audio"]
    assert submit.params["max_tokens"] == 12


async def test_aiperf_completions_and_responses(speaking: Server) -> None:
    await speaking.replica("thinker")
    completions = await speaking.http.post(
        "/v1/completions",
        json={
            "prompt": "a b c",
            "model": "test-omni",
            "stream": True,
            "max_tokens": 5,
            "stream_options": {"include_usage": True},
        },
    )
    chunks = sse_events(completions.text)[:-1]
    assert "".join(c["text"] for e in chunks for c in e["choices"]) == "Hello world."
    body: dict[str, Any] = {
        "input": [{"role": "user", "type": "message", "content": [{"type": "input_text", "text": "hi"}]}],
        "instructions": "Be brief.",
        "model": "test-omni",
        "stream": True,
        "max_output_tokens": 5,
    }
    events = sse_events((await speaking.http.post("/v1/responses", json=body)).text)
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == "Hello world."
    assert events[-1]["response"]["usage"]["output_tokens"] == 4


async def test_load_counts_what_is_not_through(server: Server) -> None:
    thinker = await server.replica("thinker", hold_after=0)
    assert (await server.http.get("/load")).json() == {"server_load": 0, "running": 0, "waiting": 0}
    from tests.unit.orchestrator.conftest import a_call

    handle = server.orchestrator.submit(a_call("text"))
    await thinker.held.wait()
    assert (await server.http.get("/load")).json() == {"server_load": 1, "running": 1, "waiting": 0}
    handle.cancel("test")


async def test_ping_is_health(server: Server) -> None:
    assert (await server.http.get("/ping")).status_code == 503
    await server.replicas()
    assert (await server.http.post("/ping")).status_code == 200


async def test_who_asks_reaches_the_orchestrator(server: Server) -> None:
    """Tenant and session are names; the deadline is the client's as far as the plan allows it."""
    await server.replica("thinker", script=lambda r: [control.ClientText(r, "x"), control.StageFinished(r, "stop")])
    seen: list[Any] = []
    submit = server.orchestrator.submit
    server.orchestrator.submit = lambda call: (seen.append(call), submit(call))[1]  # type: ignore[method-assign]
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"messages": [{"role": "user", "content": "x"}], "user": "u-1", "timeout_seconds": 10_000}
    headers = {"x-omni-tenant": "team-a", "traceparent": trace, "x-request-id": "r-1"}
    assert (await server.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    (call,) = seen
    assert (call.tenant, call.session, call.label, call.trace_parent) == ("team-a", "u-1", "r-1", trace)
    assert call.deadline_seconds == server.plan.entry.request_timeout_seconds
    await server.http.post("/v1/chat/completions", json=body, headers={"x-omni-session": "s-1", "traceparent": "junk"})
    assert (seen[1].session, seen[1].trace_parent) == ("s-1", "")
    bad = await server.http.post("/v1/chat/completions", json=body, headers={"x-omni-tenant": "a b"})
    assert bad.status_code == 400
    assert "x-omni-tenant" in bad.json()["error"]["message"]
