"""What is asked: prompts, media and limits of the requests of a run. Seeded, so that two servers get the same."""

from __future__ import annotations

import base64
import io
import itertools
import math
import random
import struct
import wave
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._arrivals import Arrival
from benchmarks._load import Request

INPUTS = ("text", "audio", "image")
OUTPUTS = ("text", "speech")
KINDS = tuple(f"{i}-to-{o}" for i, o in itertools.product(INPUTS, OUTPUTS))

PROMPTS = (
    "Why is the sky blue? Answer in two short sentences.",
    "Tell me a short story about a lighthouse keeper.",
    "What should I cook tonight with rice, eggs and spinach?",
    "Explain to a child how a bicycle stays upright.",
    "Give me three reasons to learn a second language.",
    "Describe the sound of rain in a forest.",
    "How do tides work?",
    "Recommend a weekend trip to the mountains.",
    "What makes bread rise?",
    "Write a birthday message for an old friend.",
)
AUDIO_SECONDS, AUDIO_RATE = 1.0, 16_000
IMAGE_SIZE = 64


class BadMix(ValueError):
    """The mix is not understood; says what would be."""


def parse_mix(text: str) -> dict[str, float]:
    """ "text-to-text=3,text-to-speech=1" -> shares that add up to 1. Raises BadMix."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        kind, _, weight = part.strip().partition("=")
        if kind not in KINDS:
            raise BadMix(f"mix: {kind!r} is no kind of request; use {', '.join(KINDS)}")
        try:
            value = float(weight or 1)
        except ValueError:
            value = -1.0
        if not (math.isfinite(value) and value > 0):
            raise BadMix(f"mix: {part.strip()!r}: the weight is not a number above 0; write for example {kind}=1")
        shares[kind] = shares.get(kind, 0.0) + value
    whole = sum(shares.values())
    return {kind: value / whole for kind, value in shares.items()}


@dataclass(frozen=True, slots=True)
class Workload:
    """max_tokens: of answers whose arrival does not say how long they are, and the limit of all."""

    mix: dict[str, float]
    prompts: Sequence[str] = PROMPTS
    max_tokens: int = 64
    max_input_tokens: int = 1024
    ignore_eos: bool = False
    model: str | None = None

    def requests(self, arrivals: Sequence[Arrival], seed: int) -> Iterator[Request]:
        numbers = random.Random(seed)
        kinds, weights = list(self.mix), list(self.mix.values())
        for arrival in arrivals:
            kind = numbers.choices(kinds, weights)[0]
            prompt = numbers.choice(list(self.prompts))
            if arrival.input_tokens is not None:
                prompt = padded(prompt, min(arrival.input_tokens, self.max_input_tokens), numbers)
            tokens = min(arrival.output_tokens or self.max_tokens, self.max_tokens)
            yield Request(kind, self._body(kind, prompt, max(1, tokens)))

    def _body(self, kind: str, prompt: str, tokens: int) -> dict[str, Any]:
        source, _, output = kind.partition("-to-")
        content: str | list[dict[str, Any]] = prompt
        if source != "text":
            content = [_media(source), {"type": "text", "text": prompt}]
        speech = output == "speech"
        return {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"modalities": ["text", "audio"], "audio": {"format": "pcm16"}} if speech else {}),
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **({"model": self.model} if self.model else {}),
        }


def padded(prompt: str, tokens: int, numbers: random.Random) -> str:
    """The prompt behind so many digits that it has about `tokens` tokens; random, so that no prefix cache helps."""
    missing = tokens - len(prompt) // 4
    if missing <= 0:
        return prompt
    digits = " ".join(str(numbers.randrange(10)) for _ in range(missing // 2))
    return f"{digits} {prompt}"


def _media(source: str) -> dict[str, Any]:
    if source == "audio":
        return {"type": "input_audio", "input_audio": {"data": _base64(tone_wav()), "format": "wav"}}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(gradient_png())}"}}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def tone_wav() -> bytes:
    """AUDIO_SECONDS of 440 Hz, mono PCM16."""
    file = io.BytesIO()
    count = round(AUDIO_SECONDS * AUDIO_RATE)
    samples = (round(8000 * math.sin(2 * math.pi * 440 * i / AUDIO_RATE)) for i in range(count))
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(AUDIO_RATE)
        out.writeframes(struct.pack(f"<{count}h", *samples))
    return file.getvalue()


def gradient_png(size: int = IMAGE_SIZE) -> bytes:
    """A square RGB image; written by hand, so that the client needs no imaging library."""

    def block(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    step = 255 // max(1, size - 1)
    rows = b"".join(b"\0" + bytes(v for x in range(size) for v in (x * step, y * step, 128)) for y in range(size))
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", zlib.compress(rows)) + block(b"IEND", b"")
