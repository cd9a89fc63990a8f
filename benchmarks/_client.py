"""The client of the benchmarks: chat completions of any OpenAI-compatible server, and when each piece came.

It decodes into typed values and keeps moments, not content: on the machines where this runs, client and server share
the cores. What the moments mean is in `_metrics`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
import uuid
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

DEFAULT_SAMPLE_RATE = 24_000  # of raw PCM16 whose chunks do not say it


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()  # absent where the answer is not streamed
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Error(msgspec.Struct, frozen=True):
    message: str = ""


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    modality: str | None = None
    sample_rate: int | None = None
    usage: _Usage | None = None
    error: _Error | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request. Moments are seconds after it was sent.

    sent_at: on the clock of the run; late_s: how long after its planned moment; text: moments of chunks with text;
    audio: (moment, seconds of audio) of each chunk; error: why it failed, "" if it did not.
    """

    kind: str
    sent_at: float
    ended: float
    late_s: float = 0.0
    text: tuple[float, ...] = ()
    audio: tuple[tuple[float, float], ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""
    answer: str = ""
    error: str = ""


OnChunk = Callable[[str, str], object]  # modality, content; for whoever wants more than moments


def new_session() -> aiohttp.ClientSession:
    """Connections are kept alive, and their number has no limit: a hidden queue in the client would be counted as the
    server's."""
    timeout = aiohttp.ClientTimeout(total=None, connect=30.0)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=1 << 20)


async def send_chat(
    http: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    kind: str = "text-to-text",
    late_s: float = 0.0,
    timeout_s: float = 600.0,
    on_chunk: OnChunk | None = None,
) -> Timeline:
    """Never raises for what a server does: a failure is a Timeline with an error."""
    started = time.perf_counter()
    heard = _Heard(started, on_chunk)
    error = ""
    headers = {"x-request-id": uuid.uuid4().hex, "content-type": "application/json"}
    try:
        async with (
            asyncio.timeout(timeout_s),
            http.post(f"{url}/v1/chat/completions", data=msgspec.json.encode(body), headers=headers) as response,
        ):
            if response.status != 200:
                error = f"HTTP {response.status}: {(await response.text())[:200]}"
            elif body.get("stream"):
                async for line in response.content:
                    heard.line(line)
                error = heard.problem
            else:
                heard.whole(await response.read())
                error = heard.problem
    except TimeoutError:
        error = f"no end within {timeout_s:.0f} s"
    except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    return Timeline(
        kind=kind,
        sent_at=started,
        ended=heard.last if not error else time.perf_counter() - started,
        late_s=late_s,
        text=tuple(heard.text),
        audio=tuple(heard.audio),
        prompt_tokens=heard.usage.prompt_tokens,
        completion_tokens=heard.usage.completion_tokens or 0,
        finish_reason=heard.finish,
        answer="".join(heard.answer),
        error=error,
    )


class _Heard:
    """What a stream has said so far."""

    def __init__(self, started: float, on_chunk: OnChunk | None) -> None:
        self._started, self._on_chunk = started, on_chunk
        self.text: list[float] = []
        self.audio: list[tuple[float, float]] = []
        self.answer: list[str] = []
        self.usage = _Usage()
        self.finish = ""
        self.last = 0.0
        self._error = ""

    @property
    def problem(self) -> str:
        """A stream that ends without a finish reason is a server that went away."""
        return self._error or ("" if self.finish else "the stream ended without a finish reason")

    def whole(self, body: bytes) -> None:
        """An answer that is not streamed: it ends when it comes, and has no pieces."""
        self.last = time.perf_counter() - self._started
        chunk = _decode(body)
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finish = choice.finish_reason or self.finish

    def line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        now = time.perf_counter() - self._started
        data = line[5:].strip()
        self.last = now
        if data == b"[DONE]":
            return
        chunk = _decode(data)
        if chunk.error is not None:
            self._error = chunk.error.message or "error"
            return
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            if content := choice.delta.content:
                self._content(chunk, content, now)
            self.finish = choice.finish_reason or self.finish

    def _content(self, chunk: _Chunk, content: str, now: float) -> None:
        audio = chunk.modality == "audio"
        if self._on_chunk is not None:
            self._on_chunk("audio" if audio else "text", content)
        if audio:
            self.audio.append((now, audio_seconds(content, chunk.sample_rate or DEFAULT_SAMPLE_RATE)))
        else:
            self.text.append(now)
            self.answer.append(content)


_decode = msgspec.json.Decoder(_Chunk).decode


def audio_seconds(content: str, sample_rate: int) -> float:
    """Of one base64 chunk: raw PCM16 mono, or a WAV of its own, as some servers send."""
    if not content.startswith("UklGR"):  # "RIFF" in base64
        padding = content.count("=", -2)
        return (len(content) * 3 // 4 - padding) / 2 / sample_rate
    with wave.open(io.BytesIO(base64.b64decode(content))) as file:
        seconds: float = file.getnframes() / file.getframerate()
        return seconds


def chunk_bytes(content: str) -> bytes:
    return base64.b64decode(content)


def errors_of(timelines: list[Timeline]) -> Iterator[tuple[str, int]]:
    """Distinct reasons and how often each came, the most frequent first."""
    counts: dict[str, int] = {}
    for timeline in timelines:
        if timeline.error:
            counts[timeline.error] = counts.get(timeline.error, 0) + 1
    yield from sorted(counts.items(), key=lambda item: -item[1])
