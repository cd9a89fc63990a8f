"""/v1/audio/speech and /v1/audio/voices, through the official client and on the wire."""

from __future__ import annotations

import asyncio
import base64
import io
import wave
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile

from omni_runtime.protocol import control
from omni_runtime.topology.types import EngineKind
from tests.unit.orchestrator.conftest import eventually
from tests.unit.serving.conftest import Server, sse_events, submit_of

SAMPLES = 7_200  # of the fake code2wav's three pieces


async def test_openai_client_whole_file(speaking: Server) -> None:
    """The text goes to the talker at once; the thinker has no part in it."""
    thinker, talker, _ = await speaking.replicas(talker={"voices": ("heart", "bella")})
    answer = await speaking.openai.audio.speech.create(
        model="test-omni", voice="heart", input="Good morning.", response_format="wav"
    )
    with wave.open(io.BytesIO(answer.content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (24_000, 1, SAMPLES)
    assert thinker.submits == {}
    submit = await submit_of(talker)
    assert submit.inputs == {"text": "Good morning.", "finished": True}
    assert submit.text_edge == "thinker->talker"
    assert submit.params["voice"] == "heart"


@pytest.mark.parametrize(
    ("audio_format", "media_type", "container"),
    [
        ("wav", "audio/wav", "WAV"),
        ("flac", "audio/flac", "FLAC"),
        ("mp3", "audio/mpeg", "MP3"),
        ("opus", "audio/ogg", "OGG"),
    ],
)
async def test_every_format_is_a_file_of_its_kind(
    speaking: Server, audio_format: str, media_type: str, container: str
) -> None:
    await speaking.replicas()
    response = await speaking.speech(response_format=audio_format)
    assert response.headers["content-type"] == media_type
    assert response.headers["x-audio-seconds"] == "0.3000"
    with soundfile.SoundFile(io.BytesIO(response.content)) as file:
        assert (file.format, file.samplerate, file.channels) == (container, 24_000, 1)
        assert file.frames / file.samplerate == pytest.approx(0.3, abs=0.08)  # mp3 fills its last frame


@pytest.mark.parametrize("audio_format", ["wav", "flac", "mp3", "opus"])
async def test_nothing_to_say_is_a_file_without_sound(speaking: Server, audio_format: str) -> None:
    """A text such as "..." has no phrase that a voice could say."""

    def silent(request: str) -> list[control.StageMessage]:
        return [control.StageStarted(request), control.StageFinished(request, "stop")]

    await speaking.replicas(code2wav={"script": silent})
    response = await speaking.speech(input="...", response_format=audio_format)
    assert (response.status_code, response.headers["x-audio-seconds"]) == (200, "0.0000")
    with soundfile.SoundFile(io.BytesIO(response.content)) as file:
        assert file.samplerate == 24_000
        samples = file.read(dtype="float32")
    assert len(samples) / 24_000 == pytest.approx(0.05, abs=0.08)
    assert len(samples) > 0, "players and browsers open no file without samples"
    assert np.abs(samples).max() < 1e-6


@pytest.mark.parametrize("stream_format", ["sse", "audio"])
async def test_nothing_to_say_is_a_stream_without_sound(speaking: Server, stream_format: str) -> None:
    def silent(request: str) -> list[control.StageMessage]:
        return [control.StageStarted(request), control.StageFinished(request, "stop")]

    await speaking.replicas(code2wav={"script": silent})
    response = await speaking.speech(input="...", response_format="pcm", stream_format=stream_format)
    assert response.status_code == 200
    if stream_format == "audio":
        assert response.content == b""
    else:
        assert [e["type"] for e in sse_events(response.text)] == ["speech.audio.done"]


async def test_nothing_to_say_is_a_wav_stream_that_can_be_opened(speaking: Server) -> None:
    def silent(request: str) -> list[control.StageMessage]:
        return [control.StageStarted(request), control.StageFinished(request, "stop")]

    await speaking.replicas(code2wav={"script": silent})
    response = await speaking.speech(input="...", response_format="wav", stream_format="audio")
    with soundfile.SoundFile(io.BytesIO(response.content)) as file:
        assert (file.samplerate, file.frames) == (24_000, 1_200)


async def test_pcm_is_bare_samples(speaking: Server) -> None:
    await speaking.replicas()
    response = await speaking.speech(response_format="pcm")
    assert len(response.content) == SAMPLES * 2
    assert response.headers["x-sample-rate"] == "24000"


async def test_stream_is_sse_by_default(speaking: Server) -> None:
    await speaking.replicas()
    response = await speaking.speech(stream=True, response_format="pcm")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.startswith("event: speech.audio.delta\ndata: ")
    *deltas, done = sse_events(response.text)
    assert {d["type"] for d in deltas} == {"speech.audio.delta"}
    assert sum(len(base64.b64decode(d["audio"])) for d in deltas) == SAMPLES * 2
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["audio_seconds"] == pytest.approx(0.3)
    assert done["usage"]["output_tokens"] == 6


@pytest.mark.parametrize(("audio_format", "size"), [("pcm", SAMPLES * 2), ("wav", 44 + SAMPLES * 2)])
async def test_stream_of_bytes(speaking: Server, audio_format: str, size: int) -> None:
    """What vLLM's benchmark client asks of openai-audio-speech; a WAV has one header, with open sizes (R48, R50)."""
    await speaking.replicas()
    response = await speaking.speech(stream=True, stream_format="audio", response_format=audio_format)
    assert len(response.content) == size
    assert response.content.count(b"RIFF") == (1 if audio_format == "wav" else 0)
    assert response.headers["x-sample-rate"] == "24000"


async def test_an_error_in_a_stream_is_an_event(speaking: Server) -> None:
    def breaking(request: str) -> list[control.StageMessage]:
        return [
            control.ClientAudio(request, b"\0" * 400, 24_000, 1),
            control.StageFailed(request, "EngineError", "boom"),
        ]

    await speaking.replicas(code2wav={"script": breaking})
    delta, error = sse_events((await speaking.speech(stream=True, response_format="pcm")).text)
    assert delta["type"] == "speech.audio.delta"
    assert error["type"] == "speech.audio.error"
    assert "boom" in error["error"]["message"]


async def test_an_error_in_a_stream_of_bytes_breaks_it_off(speaking: Server) -> None:
    """Half an answer must not look like a whole one (R23)."""
    import httpx

    def breaking(request: str) -> list[control.StageMessage]:
        return [
            control.ClientAudio(request, b"\0" * 400, 24_000, 1),
            control.StageFailed(request, "EngineError", "boom"),
        ]

    await speaking.replicas(code2wav={"script": breaking})
    port = await speaking.listen()
    body = {"input": "x", "stream_format": "audio", "response_format": "pcm"}
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(f"http://127.0.0.1:{port}/v1/audio/speech", json=body)


async def test_voices_come_from_the_talkers(speaking: Server) -> None:
    assert (await speaking.http.get("/v1/audio/voices")).json() == {"voices": [], "uploaded_voices": []}
    await speaking.replicas(talker={"voices": ("heart",)})
    second = await speaking.replica("talker", voices=("bella", "heart"))
    assert (await speaking.http.get("/v1/audio/voices")).json()["voices"] == ["bella", "heart"]
    await second.kill()
    await eventually(lambda: speaking.orchestrator.status().stages[1].voices == ("heart",))


@pytest.mark.parametrize("surface", ["speech", "chat"])
async def test_an_unknown_voice_names_the_known_ones(speaking: Server, surface: str) -> None:
    _, talker, _ = await speaking.replicas(talker={"voices": ("heart", "bella")})
    if surface == "speech":
        response = await speaking.speech(voice="nova")
    else:
        response = await speaking.chat(modalities=["audio"], audio={"voice": "nova"})
    assert response.status_code == 400
    for word in ("voice", "nova", "bella", "heart"):
        assert word in response.json()["error"]["message"]
    assert talker.submits == {}


@pytest.mark.parametrize(
    ("voice", "meant"),
    [("alloy", "alloy"), ("Default", "default"), ("HEART", "heart"), ({"id": "heart"}, "heart"), (None, None)],
)
async def test_voices_that_openai_clients_send(speaking: Server, voice: Any, meant: str | None) -> None:
    """An alias means the talker's own voice; names are sent as the talker spells them."""
    _, talker, _ = await speaking.replicas(talker={"voices": ("heart",)})
    assert (await speaking.speech(voice=voice)).status_code == 200
    assert (await submit_of(talker)).params["voice"] == meant


async def test_speaker_is_another_name_of_voice(speaking: Server) -> None:
    _, talker, _ = await speaking.replicas()
    await speaking.speech(speaker="heart")
    assert (await submit_of(talker)).params["voice"] == "heart"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"input": ""}, ["input", "at least 1"], id="empty"),
        pytest.param({"input": " \n"}, ["input", "blank"], id="blank"),
        pytest.param({"input": 7}, ["input", "7"], id="not text"),
        pytest.param({"input": "x" * 100_001}, ["input", "at most 100000"], id="too long"),
        pytest.param({"voice": "../../etc/passwd"}, ["voice"], id="voice is no path (R58)"),
        pytest.param({"response_format": "aac"}, ["response_format", "aac", "opus"], id="format"),
        pytest.param({"stream": True, "response_format": "mp3"}, ["mp3", "cannot be streamed", "pcm"], id="mp3 stream"),
        pytest.param({"stream_format": "audio", "response_format": "opus"}, ["opus", "cannot"], id="opus bytes"),
        pytest.param({"stream_format": "xml"}, ["stream_format", "xml", "sse"], id="stream format"),
        pytest.param({"speed": 9}, ["speed", "9", "4"], id="speed out of range"),
        pytest.param({"speed": 1.5}, ["speed", "1.5", "one speed"], id="speed that the engine has not"),
        pytest.param({"seed": "x"}, ["seed", "x"], id="seed"),
        pytest.param({"max_new_tokens": 0}, ["max_new_tokens", "0"], id="max_new_tokens"),
        pytest.param(
            {"instructions": "whisper"}, ["instructions", "whisper", "leave the field out"], id="instructions"
        ),
        pytest.param({"task_type": "VoiceDesign"}, ["task_type", "CustomVoice"], id="task type"),
        pytest.param({"ref_audio": "data:audio/wav;base64,AA"}, ["ref_audio", "not cloned"], id="cloning"),
        pytest.param({"sample_rate": 8000}, ["sample_rate", "8000"], id="sample rate"),
        pytest.param({"word_timestamps": True}, ["word_timestamps"], id="timestamps"),
        pytest.param({"timeout_seconds": -1}, ["timeout_seconds", "-1"], id="timeout"),
    ],
)
async def test_bad_requests_name_field_value_and_fix(
    speaking: Server, fields: dict[str, Any], words: list[str]
) -> None:
    response = await speaking.speech(**fields)
    assert response.status_code == 400
    for word in words:
        assert word in response.json()["error"]["message"]


async def test_unknown_model(speaking: Server) -> None:
    assert (await speaking.speech(model="other")).status_code == 404


async def test_speed_reaches_an_engine_that_can(speaking: Server) -> None:
    _, talker, _ = await speaking.replicas()
    stages = tuple(
        msgspec.structs.replace(s, engine=EngineKind.HIBARI_ACOUSTIC) if s.name == "talker" else s
        for s in speaking.plan.stages
    )
    object.__setattr__(speaking.app.state.context, "plan", msgspec.structs.replace(speaking.plan, stages=stages))
    assert (await speaking.speech(speed=1.5)).status_code == 200
    assert (await submit_of(talker)).params["speed"] == 1.5


async def test_a_talker_that_needs_hidden_states_cannot_speak_text(server: Server) -> None:
    response = await server.speech()
    assert response.status_code == 400
    for word in ("qwen3_omni_moe", "/v1/chat/completions", "smol_omni"):
        assert word in response.json()["error"]["message"]


@pytest.mark.parametrize("stream_format", ["sse", "audio", None])
@pytest.mark.parametrize("sent", [0, 1, 2, 4])
async def test_disconnect_aborts_everywhere(speaking: Server, stream_format: str | None, sent: int) -> None:
    """R16: after any number of outputs."""
    holds = {"thinker": 0, "talker": min(sent, 2), "code2wav": sent}
    _, *fakes = await speaking.replicas(**{stage: {"hold_after": n} for stage, n in holds.items()})
    left = asyncio.Event()
    body = {"input": "hello", "response_format": "pcm", "stream_format": stream_format}
    asking = asyncio.create_task(speaking.post_and_leave("/v1/audio/speech", body, left))
    for fake in fakes:
        await asyncio.wait_for(fake.held.wait(), 5)
    left.set()
    await asking
    await eventually(lambda: speaking.orchestrator.unfinished == 0)
    assert speaking.bound == 0
    assert all(f.aborts for f in fakes)


@pytest.mark.parametrize("heard", [0, 2])
async def test_streams_are_counted_by_how_they_end(speaking: Server, heard: int) -> None:
    """vllm_omni:speech_stream_completed and _aborted: also of a client that leaves before the first sound."""

    def breaking(request: str) -> list[control.StageMessage]:
        return [
            control.ClientAudio(request, b"\0" * 400, 24_000, 1),
            control.StageFailed(request, "EngineError", "boom"),
        ]

    _, talker, code2wav = await speaking.replicas()
    await speaking.speech(stream=True, response_format="pcm")
    code2wav.script = breaking
    await speaking.speech(stream=True, response_format="pcm")
    code2wav.script, code2wav.hold_after = None, heard
    left = asyncio.Event()
    body = {"input": "hello", "response_format": "pcm", "stream": True}
    asking = asyncio.create_task(speaking.post_and_leave("/v1/audio/speech", body, left))
    await asyncio.wait_for(code2wav.held.wait(), 5)
    await eventually(lambda: len(talker.submits) == 3)
    left.set()
    await asking
    text = (await speaking.http.get("/metrics")).text
    label = 'model_name="test-omni"'
    assert f"vllm_omni:speech_stream_completed_total{{{label}}} 1.0" in text
    for reason, count in (("error", 1), ("cancelled", 1), ("engine_dead", 0), ("closed", 0)):
        assert f'vllm_omni:speech_stream_aborted_total{{{label},reason="{reason}"}} {count}.0' in text
