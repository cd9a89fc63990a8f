"""The client against a scripted server: what it makes of streams, failures and silence, and how the loops send."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks._client import audio_seconds, errors_of, new_session, send_chat
from benchmarks._load import NOT_SENT, Request, closed_loop, open_loop
from benchmarks._null_stage import stamp_of, stamped_audio
from omni_runtime.serving.audio import pcm16

Handler = Callable[[web.Request], Any]


def a_chunk(content: str = "", modality: str | None = "text", finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    body = {"choices": [choice], **({"modality": modality} if modality else {}), **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


def answering(*pieces: bytes, status: int = 200) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    return handle


@asynccontextmanager
async def a_server(handler: Handler) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with new_session() as http:
            yield http, f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


STREAM = {"stream": True}


async def test_text_and_audio_of_our_own_server() -> None:
    sound = base64.b64encode(bytes(4800)).decode()
    pieces = (
        a_chunk(""),
        a_chunk("Hel"),
        a_chunk("lo"),
        a_chunk(sound, "audio", sample_rate=24_000),
        a_chunk("", "audio", finish="stop"),
        USAGE,
        DONE,
    )
    async with a_server(answering(*pieces)) as (http, url):
        timeline = await send_chat(http, url, STREAM, kind="text-to-speech")
    assert timeline.error == ""
    assert timeline.answer == "Hello"
    assert len(timeline.text) == 2, "an empty chunk is no text"
    assert [s for _, s in timeline.audio] == [0.1]
    assert (timeline.prompt_tokens, timeline.completion_tokens) == (3, 2)
    assert timeline.text[0] <= timeline.text[1] <= timeline.audio[0][0] <= timeline.ended


async def test_plain_vllm_says_no_modality() -> None:
    async with a_server(answering(a_chunk("a", None), a_chunk("b", None, finish="length"), DONE)) as (http, url):
        timeline = await send_chat(http, url, STREAM)
    assert (timeline.answer, timeline.finish_reason, timeline.error) == ("ab", "length", "")


async def test_events_may_be_cut_anywhere() -> None:
    whole = a_chunk("Hello") + a_chunk("", finish="stop") + DONE
    pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    async with a_server(answering(*pieces)) as (http, url):
        assert (await send_chat(http, url, STREAM)).answer == "Hello"


async def test_an_answer_that_is_not_streamed() -> None:
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
    async with a_server(answering(json.dumps(body).encode())) as (http, url):
        timeline = await send_chat(http, url, {"stream": False})
    assert (timeline.error, timeline.completion_tokens, timeline.text) == ("", 1, ())
    assert timeline.ended > 0


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        pytest.param(answering(b"full", status=429), "HTTP 429: full", id="refused"),
        pytest.param(answering(a_chunk("x")), "without a finish reason", id="cut off"),
        pytest.param(answering(a_chunk("x"), b'data: {"error": {"message": "lost"}}\n\n'), "lost", id="error event"),
        pytest.param(answering(b"data: {nonsense\n\n"), "DecodeError", id="no JSON"),
    ],
)
async def test_a_failure_is_a_timeline_with_a_reason(handler: Handler, says: str) -> None:
    async with a_server(handler) as (http, url):
        timeline = await send_chat(http, url, STREAM)
    assert says in timeline.error


async def test_nobody_there() -> None:
    async with new_session() as http:
        timeline = await send_chat(http, "http://127.0.0.1:9", STREAM)
    assert "127.0.0.1:9" in timeline.error


async def test_a_silent_server_ends_at_the_deadline() -> None:
    over = asyncio.Event()

    async def silent(_: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    async with a_server(silent) as (http, url):
        timeline = await send_chat(http, url, STREAM, timeout_s=0.05)
        over.set()
    assert timeline.error.startswith("no end within")


@pytest.mark.parametrize("samples", [0, 1, 2, 3, 2400])
def test_seconds_of_raw_and_of_wav(samples: int) -> None:
    raw = bytes(2 * samples)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(raw)
    assert audio_seconds(base64.b64encode(raw).decode(), 24_000) == samples / 24_000
    assert audio_seconds(base64.b64encode(file.getvalue()).decode(), 24_000) == samples / 16_000


def test_a_moment_survives_the_way_through_pcm16() -> None:
    for moment in (0, 1, 1_234_567_890_123_456_789, 2**63 - 1):
        assert stamp_of(pcm16(stamped_audio(moment))) == moment


# --- loops


def counting(peak: list[int]) -> Handler:
    """A server that takes a moment, and notes how many requests it had at the most."""
    now = 0

    async def handle(_: web.Request) -> web.Response:
        nonlocal now
        now += 1
        peak.append(now)
        await asyncio.sleep(0.02)
        now -= 1
        return web.json_response({"choices": [{"finish_reason": "stop"}]})

    return handle


REQUEST = Request("text-to-text", {"stream": False})


async def test_a_closed_loop_keeps_its_number_of_requests_in_flight() -> None:
    peak: list[int] = []
    async with a_server(counting(peak)) as (http, url):
        timelines = await closed_loop(http, url, [REQUEST] * 12, concurrency=4, deadline_s=10)
    assert len(timelines) == 12
    assert list(errors_of(timelines)) == []
    assert max(peak) == 4


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    peak: list[int] = []
    async with a_server(counting(peak)) as (http, url):
        timelines = await open_loop(http, url, [REQUEST] * 10, [0.0] * 10, deadline_s=10)
    assert len(timelines) == 10
    assert max(peak) == 10
    assert all(t.late_s >= 0 for t in timelines)


async def test_requests_leave_at_their_moments() -> None:
    async with a_server(counting([])) as (http, url):
        timelines = await open_loop(http, url, [REQUEST] * 3, [0.0, 0.1, 0.2], deadline_s=10)
    sent = sorted(t.sent_at for t in timelines)
    assert sent[1] - sent[0] >= 0.1 - 0.02
    assert sent[2] - sent[0] >= 0.2 - 0.02


async def test_what_was_not_sent_in_time_is_counted_as_failed() -> None:
    async with a_server(counting([])) as (http, url):
        closed = await closed_loop(http, url, [REQUEST] * 50, concurrency=1, deadline_s=0.1)
        opened = await open_loop(http, url, [REQUEST] * 2, [0.0, 60.0], deadline_s=1)
    assert len(closed) == 50
    assert dict(errors_of(closed))[NOT_SENT] > 40
    assert [t.error for t in opened if t.error] == [NOT_SENT]
