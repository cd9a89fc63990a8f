"""A running Qwen3-Omni pipeline against transformers' `generate` on the same checkpoint, over its public API.

`python -m tests.e2e.exactness http://127.0.0.1:8000` prints a table; the tests call `compare`.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from tests.unit.models.videos import a_video, noise
from tests.unit.stages.qwen3_reference import Expected, Reference, tiny_model_path

PROMPTS = 24
CONCURRENCY = 8
TEXT_TOKENS = 16
TALKER_TOKENS = 60
PCM_TOLERANCE = 1e-4
KINDS = ("text", "audio", "image", "video")
SAMPLE_RATE = 16_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """Everything follows from the number."""

    number: int

    @property
    def kind(self) -> str:
        return "video" if self.number % 4 == 3 else KINDS[self.number % 3]

    @property
    def text(self) -> str:
        return f"tell me about number {self.number}" + " and more" * (self.number % 4)

    def tone(self) -> np.ndarray:
        """One second: the audio encoder is only then independent of what else is in its batch."""
        t = np.arange(SAMPLE_RATE) / SAMPLE_RATE
        return np.round(12_000 * np.sin(2 * np.pi * (200 + 40 * self.number) * t)).astype(np.int16)

    def pixels(self) -> np.ndarray:
        rng = np.random.default_rng(self.number)
        return rng.integers(0, 255, (32, 24 + 8 * (self.number % 2), 3), dtype=np.uint8)

    def frames(self) -> np.ndarray:
        """An odd number of them among the prompts, whose last one stands for two."""
        return noise(2 + self.number % 3, 32, 24 + 8 * (self.number % 5), seed=self.number)

    def openai_messages(self) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"type": "text", "text": self.text}]
        if self.kind == "audio":
            data = base64.b64encode(_wav(self.tone())).decode()
            parts.insert(0, {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
        elif self.kind == "image":
            url = "data:image/png;base64," + base64.b64encode(_png(self.pixels())).decode()
            parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
        elif self.kind == "video":
            url = "data:video/mp4;base64," + base64.b64encode(a_video(self.frames())).decode()
            parts.insert(0, {"type": "video_url", "video_url": {"url": url}})
        return [{"role": "user", "content": parts}]

    def reference_inputs(self, reference: Reference) -> dict[str, Any]:
        from PIL import Image

        parts: list[dict[str, Any]] = [{"type": "text", "text": self.text}]
        media: dict[str, Any] = {}
        if self.kind != "text":
            parts.insert(0, {"type": self.kind})
        if self.kind == "audio":
            media["audio"] = [(self.tone() / 32_768).astype(np.float32)]
        elif self.kind == "image":
            media["images"] = [Image.fromarray(self.pixels())]
        elif self.kind == "video":
            media["videos"] = [self.frames()]
        return reference.inputs([{"role": "user", "content": parts}], **media)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how it is asked. talker_tokens cuts the speech off: greedy codes are a prefix of the longer ones."""

    prompt: Prompt
    audio: bool = True
    talker_tokens: int = TALKER_TOKENS
    streamed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """What the pipeline answered."""

    text_ids: list[int]
    codes: np.ndarray  # int32 [frames, quantizers]
    pcm: np.ndarray  # float32 [samples]


@dataclass(frozen=True, slots=True)
class Row:
    """One question's comparison."""

    question: Question
    text_equal: bool
    codes_equal: bool
    frames: int
    pcm_difference: float  # inf: another length

    @property
    def exact(self) -> bool:
        return self.text_equal and self.codes_equal and self.pcm_difference <= PCM_TOLERANCE

    def __str__(self) -> str:
        marks = f"text {_mark(self.text_equal)}  codes {_mark(self.codes_equal)}"
        asked = self.question.prompt
        return f"{asked.number:>3} {asked.kind:<6} {marks}  {self.frames:>3} frames  pcm {self.pcm_difference:.1e}"


def body_of(question: Question, *, stream: bool = False) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": question.prompt.openai_messages(),
        "modalities": ["text"],
        "temperature": 0,
        "max_tokens": TEXT_TOKENS,
        "return_token_ids": True,
        "stream": stream,
    }
    if question.audio:
        body |= {
            "modalities": ["text", "audio"],
            "audio": {"format": "pcm16", "voice": "ethan"},
            "talker_temperature": 0,
            "talker_max_tokens": question.talker_tokens,
            "return_codec_codes": True,
        }
    return body


def ask(client: httpx.Client, question: Question) -> Heard:
    if question.streamed:
        return _ask_streamed(client, question)
    response = client.post("/v1/chat/completions", json=body_of(question))
    assert response.status_code == 200, response.text
    return heard_of(response.json())


def heard_of(answer: dict[str, Any]) -> Heard:
    """Of an answer in one piece."""
    audio = (answer["choices"][0]["message"].get("audio") or {}).get("data") or ""
    return _heard(answer, base64.b64decode(audio))


def _ask_streamed(client: httpx.Client, question: Question) -> Heard:
    """Chunks are joined in the order in which they came."""
    pcm = b""
    last: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body_of(question, stream=True)) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            if event["modality"] == "audio":
                pcm += base64.b64decode(event["choices"][0]["delta"].get("content") or "")
            last = event
    assert last["choices"][0]["finish_reason"], "the last chunk says why it ended"
    return _heard(last, pcm)


def _heard(extensions: dict[str, Any], pcm16: bytes) -> Heard:
    codes = np.asarray(extensions.get("codec_codes", []), dtype=np.int32)
    return Heard(
        text_ids=[int(t) for t in extensions["token_ids"]],
        codes=codes.reshape(len(codes), -1 if len(codes) else 0),
        pcm=(np.frombuffer(pcm16, "<i2") / 32_767).astype(np.float32),
    )


def compare(base_url: str, reference: Reference, *, count: int = PROMPTS, shift: int = 0) -> list[Row]:
    """Ask all prompts, CONCURRENCY at a time, and compare each answer. `shift`: see Reference."""
    questions = [Question(Prompt(n)) for n in range(count)]
    return compare_questions(base_url, reference, questions, concurrency=CONCURRENCY, shift=shift)


def compare_questions(
    base_url: str, reference: Reference, questions: Sequence[Question], *, concurrency: int, shift: int = 0
) -> list[Row]:
    """Ask the questions, `concurrency` at a time in their order, and compare each answer."""
    with httpx.Client(base_url=base_url, timeout=300) as client, ThreadPoolExecutor(concurrency) as pool:
        heard = list(pool.map(lambda q: ask(client, q), questions))
    return [
        row_of(q, answer, expected_of(q, reference, shift), reference)
        for q, answer in zip(questions, heard, strict=True)
    ]


def expected_of(question: Question, reference: Reference, shift: int = 0) -> Expected:
    inputs = question.prompt.reference_inputs(reference)
    return reference.generate(inputs, max_text=TEXT_TOKENS, max_codes=TALKER_TOKENS, shift=shift)


def row_of(question: Question, heard: Heard, want: Expected, reference: Reference) -> Row:
    # The token that ends the speech, by its kind or by the limit, makes no frame.
    codes = want.codes[: question.talker_tokens - 1 if question.audio else 0]
    one_shot = reference.decode(codes)
    same_length = heard.pcm.shape == one_shot.shape
    difference = float(np.abs(heard.pcm - one_shot).max(initial=0.0)) if same_length else float("inf")
    return Row(
        question=question,
        text_equal=heard.text_ids == want.text_ids,
        codes_equal=len(heard.codes) == len(codes) and np.array_equal(heard.codes.reshape(codes.shape), codes),
        frames=len(codes),
        pcm_difference=difference,
    )


def _wav(samples: np.ndarray) -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def _mark(equal: bool) -> str:
    return "=" if equal else "DIFFERS"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base_url")
    parser.add_argument("--count", type=int, default=PROMPTS)
    parser.add_argument("--shift", type=int, default=0, help="negative control: move the reference's rows")
    args = parser.parse_args()
    rows = compare(args.base_url, Reference(tiny_model_path()), count=args.count, shift=args.shift)
    for row in rows:
        print(row)
    exact = sum(r.exact for r in rows)
    print(f"{exact} of {len(rows)} exact")
    return 0 if exact == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
