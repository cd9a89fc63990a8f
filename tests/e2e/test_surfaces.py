"""Every surface of the API with a real model: real voices, real tokens, the official client."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from websockets.sync.client import connect

from omni_runtime.transcribe import Transcriber, word_errors
from tests.e2e.local_run import SMOL_OMNI, LocalRun, wait_for

pytestmark = pytest.mark.timeout(900)

SENTENCES = "Good morning, my friend. The weather is fine today, and the birds are singing in the garden."
SEED = 7


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    with LocalRun(tmp_path_factory.mktemp("run"), SMOL_OMNI) as run:
        yield run


@pytest.fixture(scope="module")
def client(local: LocalRun) -> OpenAI:
    return OpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def spoken(client: OpenAI) -> bytes:
    """int16 samples of SENTENCES."""
    answer = client.audio.speech.create(
        model="smol-omni", voice="heart", input=SENTENCES, response_format="pcm", extra_body={"seed": SEED}
    )
    return answer.content


def test_speech_says_the_text(spoken: bytes) -> None:
    """R19, R23: to the last word."""
    samples = np.frombuffer(spoken, dtype="<i2").astype(np.float32) / 32767.0
    heard = Transcriber()(samples, 24_000)
    assert word_errors(SENTENCES, heard).rate <= 0.15, heard


def test_speech_is_the_same_streamed_and_over_a_websocket(local: LocalRun, spoken: bytes) -> None:
    """However the text is cut, the phrases are the same, and so is the sound."""
    body = {"input": SENTENCES, "seed": SEED, "response_format": "pcm", "stream_format": "audio"}
    assert httpx.post(f"{local.url}/v1/audio/speech", json=body, timeout=60).content == spoken
    frames, kinds = [], []
    with connect(f"{local.url.replace('http', 'ws', 1)}/v1/audio/speech/stream", compression=None) as socket:
        config = {"type": "session.config", "response_format": "pcm", "stream_audio": True, "seed": SEED}
        socket.send(json.dumps(config))
        for i in range(0, len(SENTENCES), 7):
            socket.send(json.dumps({"type": "input.text", "text": SENTENCES[i : i + 7]}))
        socket.send(json.dumps({"type": "input.done"}))
        while "session.done" not in kinds:
            message = socket.recv(timeout=60)
            if isinstance(message, bytes):
                frames.append(message)
            else:
                kinds.append(json.loads(message)["type"])
    assert kinds == ["audio.start", "audio.done", "session.done"]
    assert b"".join(frames) == spoken


def test_speech_begins_before_its_text_ends(local: LocalRun) -> None:
    with connect(f"{local.url.replace('http', 'ws', 1)}/v1/audio/speech/stream", compression=None) as socket:
        socket.send(json.dumps({"type": "session.config", "response_format": "pcm", "stream_audio": True}))
        socket.send(json.dumps({"type": "input.text", "text": "Good morning, my friend. And "}))
        start, first = socket.recv(timeout=30), socket.recv(timeout=30)
        assert json.loads(start)["type"] == "audio.start"
        assert isinstance(first, bytes)
    wait_for(
        lambda: httpx.get(f"{local.url}/load").json()["server_load"] == 0, 10, "the end of a request without a client"
    )


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_an_answer_of_a_word(client: OpenAI, max_tokens: int) -> None:
    """R23: an answer that is cut off after its first token is spoken as far as it goes, and says so."""
    answer = client.chat.completions.create(
        model="smol-omni",
        messages=[{"role": "user", "content": "Name one colour."}],
        modalities=["text", "audio"],
        audio={"format": "pcm16", "voice": "heart"},
        max_tokens=max_tokens,
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == max_tokens
    assert answer.choices[0].message.audio is not None


def test_a_prompt_that_is_longer_than_the_model_takes(local: LocalRun, client: OpenAI) -> None:
    """The client is told the limit, and the stages that waited for the thinker are free again."""
    with pytest.raises(BadRequestError, match="maximum"):
        client.chat.completions.create(
            model="smol-omni",
            messages=[{"role": "user", "content": "word " * 4_000}],
            modalities=["text", "audio"],
            audio={"format": "pcm16", "voice": "heart"},
        )
    wait_for(lambda: httpx.get(f"{local.url}/load").json()["server_load"] == 0, 10, "no stage has the request")


def test_text_without_a_sound(local: LocalRun) -> None:
    """The talker makes no frame: that is an end, and no reason to wait for one."""
    body = {"input": "...", "response_format": "pcm"}
    answer = httpx.post(f"{local.url}/v1/audio/speech", json=body, timeout=30)
    assert (answer.status_code, answer.content) == (200, b"")


def test_speed_changes_the_length(client: OpenAI) -> None:
    def seconds(speed: float) -> float:
        answer = client.audio.speech.create(
            model="smol-omni", voice="heart", input=SENTENCES, response_format="wav", speed=speed
        )
        with wave.open(io.BytesIO(answer.content)) as file:
            return file.getnframes() / file.getframerate()

    assert seconds(2.0) < 0.65 * seconds(1.0)


def test_voices_are_the_talkers(local: LocalRun, client: OpenAI) -> None:
    assert httpx.get(f"{local.url}/v1/audio/voices").json()["voices"] == ["heart"]
    with pytest.raises(BadRequestError, match="heart"):
        client.audio.speech.create(model="smol-omni", voice="nova", input="x")


def test_completions_and_tokens(local: LocalRun, client: OpenAI) -> None:
    prompt = "One, two, three, four,"
    answer = client.completions.create(model="smol-omni", prompt=prompt, max_tokens=8)
    assert "five" in answer.choices[0].text
    tokens = httpx.post(f"{local.url}/tokenize", json={"prompt": prompt}).json()
    assert tokens["count"] == answer.usage.prompt_tokens  # type: ignore[union-attr]
    assert httpx.post(f"{local.url}/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": prompt}
    again = client.completions.create(model="smol-omni", prompt=tokens["tokens"], max_tokens=8)
    assert again.choices[0].text == answer.choices[0].text


def test_responses_are_chats(client: OpenAI) -> None:
    question = "Name one colour of the rainbow."
    response = client.responses.create(model="smol-omni", input=question, max_output_tokens=30)
    chat = client.chat.completions.create(
        model="smol-omni", messages=[{"role": "user", "content": question}], max_tokens=30
    )
    assert response.output_text == chat.choices[0].message.content
    events: list[Any] = list(
        client.responses.create(model="smol-omni", input=question, max_output_tokens=30, stream=True)
    )
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == response.output_text
