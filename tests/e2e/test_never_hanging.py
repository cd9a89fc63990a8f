"""Whatever ends a request, at whatever chunk, in whatever stage: the client hears of it soon, and nothing is left of it.

Real processes and sockets; the engines compute nothing (R4, R5, R6, R11, R12, R16, R34, R35, R55).
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks._null_stage import AUDIO_CHUNK_SECONDS, SAMPLE_RATE, stamp_of
from tests.e2e.null_pipeline import STAGES, NullPipeline, null_pipeline

pytestmark = pytest.mark.timeout(600)

CHUNKS = 6
INTERVAL_MS = 40
TERMINAL_SECONDS = 2.0  # from the fault to the client's last event


@pytest.fixture(scope="module")
def pipeline() -> Iterator[NullPipeline]:
    with null_pipeline() as running:
        yield running


@pytest.fixture(autouse=True)
def free_afterwards(pipeline: NullPipeline) -> Iterator[None]:
    yield
    pipeline.wait_ready()
    pipeline.wait_free()


def body(chunks: int = CHUNKS, *, modalities: tuple[str, ...] = ("text", "audio"), **fields: Any) -> dict[str, Any]:
    script = json.dumps({"chunks": chunks, "interval_ms": INTERVAL_MS})
    return {"messages": [{"role": "user", "content": script}], "modalities": list(modalities), "stream": True, **fields}


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data:") and "[DONE]" not in line:
            yield json.loads(line[5:])


def content_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Events that carry text or audio; the last one that ends the stream is not among them."""
    for event in events(response):
        if "error" in event or any(c["delta"].get("content") for c in event.get("choices", ())):
            yield event


def terminal_of(
    pipeline: NullPipeline, request: dict[str, Any], index: int, fault: Callable[[], None]
) -> tuple[dict[str, Any], float]:
    """The last event of a request that suffers `fault` after its event number `index`, and its delay after the fault."""
    struck = last_at = 0.0
    last: dict[str, Any] = {}
    with httpx.stream("POST", f"{pipeline.url}/v1/chat/completions", json=request, timeout=60) as response:
        for number, event in enumerate(events(response)):
            last, last_at = event, time.monotonic()
            if number == index:
                fault()
                struck = time.monotonic()
    return last, last_at - struck


def finished(event: dict[str, Any]) -> bool:
    return any(c.get("finish_reason") for c in event.get("choices", ()))


def test_a_whole_answer(pipeline: NullPipeline) -> None:
    with httpx.stream("POST", f"{pipeline.url}/v1/chat/completions", json=body(), timeout=30) as response:
        seen = list(events(response))
    assert sum(e.get("modality") == "text" and bool(e["choices"][0]["delta"].get("content")) for e in seen) == CHUNKS
    assert sum(e.get("modality") == "audio" and bool(e["choices"][0]["delta"].get("content")) for e in seen) == CHUNKS
    assert finished(seen[-1])


@pytest.mark.parametrize("stream", [True, False])
def test_ten_minutes_of_audio(pipeline: NullPipeline, stream: bool) -> None:
    """Far more than the entry keeps of a request that nobody reads: a client that reads gets all of it, in order."""
    request = {**body(), "audio": {"format": "pcm16"}, "stream": stream, "stream_options": {"include_usage": True}}
    # 200 times as fast as it is spoken. Faster, a client that gets no core for a second would be a slow one.
    request["messages"] = [{"role": "user", "content": json.dumps({"chunks": 3_000, "interval_ms": 1})}]
    pieces, usage = [], {}
    if stream:
        with httpx.stream("POST", f"{pipeline.url}/v1/chat/completions", json=request, timeout=60) as response:
            for event in events(response):
                usage = event.get("usage") or usage
                if event.get("modality") == "audio":
                    pieces.append(base64.b64decode(event["choices"][0]["delta"].get("content") or ""))
    else:
        answer = httpx.post(f"{pipeline.url}/v1/chat/completions", json=request, timeout=120).json()
        pieces.append(base64.b64decode(answer["choices"][0]["message"]["audio"]["data"]))
        usage = answer["usage"]
    pcm = b"".join(pieces)
    chunk = round(2 * AUDIO_CHUNK_SECONDS * SAMPLE_RATE)
    stamps = [stamp_of(pcm[i : i + chunk]) for i in range(0, len(pcm), chunk)]
    assert len(pcm) == 600 * 2 * SAMPLE_RATE
    assert usage["audio_seconds"] == 600
    assert stamps == sorted(stamps) and len(set(stamps)) == 3_000


def test_twenty_thousand_characters(pipeline: NullPipeline) -> None:
    """As a prompt, and as a text to speak: every phrase of it."""
    request = body()
    request["messages"][0]["content"] += " " * 20_000
    with httpx.stream("POST", f"{pipeline.url}/v1/chat/completions", json=request, timeout=30) as response:
        assert finished(list(events(response))[-1])
    text = "A sentence that has fifty characters and no more. " * 400
    speech = {"input": text, "response_format": "pcm"}
    answer = httpx.post(f"{pipeline.url}/v1/audio/speech", json=speech, timeout=60)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) == 400 * round(2 * AUDIO_CHUNK_SECONDS * SAMPLE_RATE)


def test_one_id_for_two_requests_at_once(pipeline: NullPipeline) -> None:
    """R62: a client's id is a label; neither request disturbs the other."""

    def ask(_: int) -> list[dict[str, Any]]:
        headers = {"x-request-id": "the-same"}
        url = f"{pipeline.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body(), headers=headers, timeout=30) as response:
            assert response.headers["x-request-id"] == "the-same"
            return list(events(response))

    with ThreadPoolExecutor(2) as pool:
        for seen in pool.map(ask, range(2)):
            assert finished(seen[-1])
            assert sum(bool(e["choices"][0]["delta"].get("content")) for e in seen) == 2 * CHUNKS


@pytest.mark.parametrize("index", range(2 * CHUNKS))
def test_a_client_that_leaves_after_any_chunk(pipeline: NullPipeline, index: int) -> None:
    with httpx.stream("POST", f"{pipeline.url}/v1/chat/completions", json=body(200), timeout=30) as response:
        stream = content_events(response)
        for _ in range(index + 1):
            next(stream)
    started = time.monotonic()
    pipeline.wait_free()
    assert time.monotonic() - started < 5.0, "200 chunks would have taken eight seconds"


@pytest.mark.parametrize("index", range(CHUNKS))
def test_a_deadline_at_any_chunk(pipeline: NullPipeline, index: int) -> None:
    """The client is told which stage had not ended (R5)."""
    seconds = (index + 0.5) * INTERVAL_MS / 1000
    started = time.monotonic()
    request = body(200, timeout_seconds=seconds)
    with httpx.stream("POST", f"{pipeline.url}/v1/chat/completions", json=request, timeout=30) as response:
        if response.status_code != 200:
            response.read()
            error = response.json()["error"]
        else:
            error = list(events(response))[-1]["error"]
    assert time.monotonic() - started < seconds + TERMINAL_SECONDS
    assert error["code"] == "DeadlineExceeded"
    assert "still running" in error["message"] or "still queued" in error["message"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "index", [n if n in (1, 3, CHUNKS) else pytest.param(n, marks=pytest.mark.long) for n in range(2 * CHUNKS + 1)]
)
def test_a_stage_that_is_killed_at_any_chunk(pipeline: NullPipeline, stage: str, index: int) -> None:
    """The client hears of the stage, soon; the stage comes back and the next request works (R34, R35)."""
    last, delay = terminal_of(pipeline, body(200), index, lambda: pipeline.kill(stage))
    assert "error" in last, last
    assert stage in last["error"]["message"]
    assert delay < TERMINAL_SECONDS + 1.0, "two seconds of a closed connection make it lost; then the client is told"
    pipeline.wait_ready()
    test_a_whole_answer(pipeline)


@pytest.mark.parametrize("index", [1, CHUNKS])
def test_a_connector_that_is_killed(pipeline: NullPipeline, index: int) -> None:
    """Its requests fail; the engines live on and attach to the new one."""
    last, delay = terminal_of(pipeline, body(200), index, lambda: pipeline.kill("connector"))
    assert "error" in last, last
    assert delay < TERMINAL_SECONDS + 1.0
    pipeline.wait_ready()
    test_a_whole_answer(pipeline)


def test_an_entry_that_is_killed(pipeline: NullPipeline) -> None:
    """The stages drop what it had asked for; the new entry gets them back."""
    with (
        pytest.raises(httpx.HTTPError),
        httpx.stream("POST", f"{pipeline.url}/v1/chat/completions", json=body(500), timeout=30) as response,
    ):
        for number, _ in enumerate(events(response)):
            if number == 2:
                pipeline.kill("entry")
    pipeline.wait_ready()
    pipeline.wait_free()
    test_a_whole_answer(pipeline)


def abort_many(pipeline: NullPipeline, count: int, every: int) -> list[dict[str, int]]:
    """`count` clients that leave after 0 to 3 events, eight at a time; memory per process after each `every`."""
    rng = np.random.default_rng(0)

    def leave(events_before: int) -> None:
        with httpx.stream("POST", f"{pipeline.url}/v1/chat/completions", json=body(200), timeout=30) as response:
            stream = events(response)
            for _ in range(events_before):
                next(stream)

    sizes = []
    with ThreadPoolExecutor(8) as pool:
        for _ in range(count // every):
            list(pool.map(leave, rng.integers(0, 4, every).tolist()))
            pipeline.wait_free()
            sizes.append({name: f.rss for name, f in pipeline.footprints().items()})
    return sizes


def test_two_hundred_aborts_leave_nothing(pipeline: NullPipeline) -> None:
    abort_many(pipeline, 40, 40)  # caches and pools are filled
    before = pipeline.footprints()
    abort_many(pipeline, 200, 100)
    after = pipeline.footprints()
    for name in before:
        assert after[name].descriptors <= before[name].descriptors + 2, name  # probes of this test come and go
        assert after[name].threads <= before[name].threads, name
        assert after[name].rss - before[name].rss < 16 << 20, name


@pytest.mark.long
def test_two_thousand_aborts_cost_no_memory(pipeline: NullPipeline) -> None:
    """The slope of the resident memory over aborts is nothing but noise: under 1 KiB each after the first quarter."""
    sizes = abort_many(pipeline, 2_000, 50)
    settled = sizes[len(sizes) // 4 :]
    for name in settled[0]:
        resident = np.array([s[name] for s in settled], dtype=float)
        slope = np.polyfit(np.arange(len(settled)) * 50.0, resident, 1)[0]
        assert slope < 1024, f"{name} grows by {slope:.0f} bytes an abort"
