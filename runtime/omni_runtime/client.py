"""A small client of a pipeline's API: asks, listens to the stream, and measures what a listener notices.

TTFT: question to first text. TTFP: question to first audio packet. RTF: seconds of the whole answer per second of
audio. Underrun: seconds that a player which starts at the first packet would have been silent.
"""

from __future__ import annotations

import base64
import json
import math
import time
import uuid
import wave
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from omni_runtime.errors import OmniError, by_code

Samples = npt.NDArray[np.float32]
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_SAMPLE_RATE = 24_000


class ServerUnreachable(OmniError):
    code = "ServerUnreachable"


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """text and samples (float32 mono, -1..1) of one answer, and when its pieces came. NaN: there was none."""

    text: str
    pcm: Samples
    sample_rate: int
    ttft_s: float
    ttfp_s: float
    e2e_s: float
    underrun_s: float
    finish_reason: str
    request_id: str
    usage: dict[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()
    codec_codes: tuple[tuple[int, ...], ...] = ()

    @property
    def audio_s(self) -> float:
        return float(self.pcm.size) / self.sample_rate

    @property
    def rtf(self) -> float:
        return self.e2e_s / self.audio_s if self.pcm.size else math.nan


def ask(
    url: str,
    question: str | list[dict[str, Any]],
    *,
    modalities: tuple[str, ...] = ("text", "audio"),
    on_text: Callable[[str], object] | None = None,
    on_audio: Callable[[Samples, int], object] | None = None,
    timeout_s: float = 600.0,
    max_tokens: int | None = None,
    http: httpx.Client | None = None,
    **fields: Any,
) -> Answer:
    """One streamed chat completion. `question`: a user's text, or whole OpenAI messages; `fields`: more of the body.

    Raises ServerUnreachable, or the OmniError that the server reports.
    """
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    body: dict[str, Any] = {
        "messages": messages,
        "modalities": list(modalities),
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"max_tokens": max_tokens} if max_tokens is not None else {}),
        **fields,
        "audio": {"format": "pcm16", **fields.get("audio", {})},
    }
    request_id = uuid.uuid4().hex
    listener = _Listener(on_text, on_audio, started=time.perf_counter())
    client = http or httpx.Client(timeout=httpx.Timeout(timeout_s, connect=10.0))
    try:
        with client.stream(
            "POST", f"{url.rstrip('/')}/v1/chat/completions", json=body, headers={"x-request-id": request_id}
        ) as response:
            if response.status_code != 200:
                response.read()
                raise _error_of(response.status_code, response.text)
            for event in _events(response.iter_lines()):
                listener.take(event)
    except httpx.TransportError as error:
        raise ServerUnreachable(
            f"{url}: {error or type(error).__name__}; is the pipeline up? see {url}/ready"
        ) from error
    finally:
        if http is None:
            client.close()
    return listener.answer(request_id)


def write_wav(path: Path, pcm: Samples, sample_rate: int) -> None:
    """Mono PCM16."""
    samples = np.rint(np.clip(pcm, -1.0, 1.0) * 32767.0).astype("<i2")
    with path.open("wb") as raw, wave.open(raw, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(samples.tobytes())


class _Listener:
    """Turns the events of one stream into an Answer."""

    def __init__(
        self,
        on_text: Callable[[str], object] | None,
        on_audio: Callable[[Samples, int], object] | None,
        started: float,
    ) -> None:
        self._on_text, self._on_audio, self._started = on_text, on_audio, started
        self._text: list[str] = []
        self._pieces: list[Samples] = []
        self._sample_rate = DEFAULT_SAMPLE_RATE
        self._ttft = self._ttfp = math.nan
        self._heard_s = self._underrun = 0.0
        self._finish = ""
        self._usage: dict[str, Any] = {}
        self._token_ids: tuple[int, ...] = ()
        self._codes: tuple[tuple[int, ...], ...] = ()

    def take(self, event: dict[str, Any]) -> None:
        now = time.perf_counter() - self._started
        if "error" in event:
            raise _reported(event["error"])
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            content = choice["delta"].get("content")
            if content and event.get("modality") == "audio":
                self._sample_rate = event.get("sample_rate", self._sample_rate)
                self._hear(content, now)
            elif content:
                self._ttft = now if math.isnan(self._ttft) else self._ttft
                self._text.append(content)
                if self._on_text is not None:
                    self._on_text(content)
            if choice.get("finish_reason"):
                self._finish = choice["finish_reason"]
                self._token_ids = tuple(event.get("token_ids", ()))
                self._codes = tuple(tuple(c) for c in event.get("codec_codes", ()))

    def _hear(self, content: str, now: float) -> None:
        samples = np.frombuffer(base64.b64decode(content), dtype="<i2").astype(np.float32) / np.float32(32767.0)
        if math.isnan(self._ttfp):
            self._ttfp = now
        self._underrun += max(0.0, (now - self._ttfp) - (self._heard_s + self._underrun))
        self._heard_s += samples.size / self._sample_rate
        self._pieces.append(samples)
        if self._on_audio is not None:
            self._on_audio(samples, self._sample_rate)

    def answer(self, request_id: str) -> Answer:
        if not self._finish:
            raise OmniError(
                "the stream ended without a finish reason: the server went away in the middle of the answer"
            )
        return Answer(
            text="".join(self._text),
            pcm=np.concatenate(self._pieces) if self._pieces else np.zeros(0, np.float32),
            sample_rate=self._sample_rate,
            ttft_s=self._ttft,
            ttfp_s=self._ttfp,
            e2e_s=time.perf_counter() - self._started,
            underrun_s=self._underrun,
            finish_reason=self._finish,
            request_id=request_id,
            usage=self._usage,
            token_ids=self._token_ids,
            codec_codes=self._codes,
        )


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events, up to [DONE]."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def _error_of(status: int, body: str) -> OmniError:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return OmniError(f"HTTP {status}: {body[:300]}")
    return _reported(error)


def _reported(error: dict[str, Any]) -> OmniError:
    kind, message = by_code(str(error.get("code"))), str(error.get("message"))
    try:
        return kind(message)
    except TypeError:
        return OmniError(message)
