"""WebSocket /v1/audio/speech/stream, over a real port: vLLM-Omni's messages."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import wave
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from omni_runtime.protocol import control
from omni_runtime.serving.context import Patience
from omni_runtime.topology.types import PayloadContract
from tests.unit.orchestrator.conftest import eventually
from tests.unit.serving.conftest import Server, a_server, submit_of

SAMPLES = 7_200  # of the fake code2wav's three pieces


class Session:
    """A client that checks nothing: JSON out, JSON and bytes in."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def receive(self) -> Any:
        async with asyncio.timeout(5):
            message = await self.socket.recv()
        return message if isinstance(message, bytes) else json.loads(message)

    async def until(self, kind: str) -> list[Any]:
        """Everything up to the first message of that type."""
        got = []
        while True:
            got.append(await self.receive())
            if isinstance(got[-1], dict) and got[-1]["type"] == kind:
                return got

    async def closed(self) -> tuple[list[Any], int]:
        """What still comes, and the code of the close."""
        got = []
        with contextlib.suppress(ConnectionClosed):
            while True:
                got.append(await self.receive())
        assert self.socket.close_code is not None
        return got, self.socket.close_code


@asynccontextmanager
async def session(server: Server, **config: Any) -> AsyncIterator[Session]:
    port = await server.listen()
    async with connect(f"ws://127.0.0.1:{port}/v1/audio/speech/stream") as socket:
        client = Session(socket)
        if config.pop("configure", True):
            await client.send("session.config", **config)
        yield client


def types(messages: list[Any]) -> list[str]:
    return ["bytes" if isinstance(m, bytes) else m["type"] for m in messages]


async def test_an_utterance_streams_as_frames(speaking: Server) -> None:
    thinker, _, _ = await speaking.replicas()
    async with session(speaking, voice="heart", response_format="pcm", stream_audio=True) as client:
        await client.send("input.text", text="Good ")
        await client.send("input.text", text="morning.")
        await client.send("input.done")
        got = await client.until("session.done")
    assert types(got) == ["audio.start", "bytes", "bytes", "bytes", "audio.done", "session.done"]
    start, *frames, done, end = got
    assert (start["format"], start["sample_rate"]) == ("pcm", 24_000)
    assert sum(map(len, frames)) == SAMPLES * 2 == done["total_bytes"]
    assert (done["error"], done["sentence_index"]) == (False, 0)
    assert (end["utterance_index"], end["total_sentences"]) == (0, 1)
    assert thinker.submits == {}


async def test_speech_starts_before_the_text_ends(speaking: Server) -> None:
    """The first piece starts the request; what follows is appended to it; input.done ends it."""
    _, talker, _ = await speaking.replicas()
    async with session(speaking, response_format="pcm", stream_audio=True) as client:
        await client.send("input.text", text="One. ")
        await client.until("audio.start")
        submit = await submit_of(talker)
        assert submit.inputs == {"text": "One. ", "finished": False}
        assert submit.params["voice"] is None


async def test_later_pieces_are_appended(speaking: Server) -> None:
    _, talker, code2wav = await speaking.replicas(talker={"hold_after": 0}, code2wav={"hold_after": 0})
    async with session(speaking, response_format="pcm", stream_audio=True) as client:
        await client.send("input.text", text="One. ")
        await asyncio.wait_for(talker.held.wait(), 5)
        await client.send("input.text", text="Two.")
        await client.send("input.done")
        await eventually(lambda: len(talker.appends) == 2)
        assert [(a.seq, a.text, a.finished) for a in talker.appends] == [(1, "Two.", False), (2, "", True)]
        talker.go.set()
        code2wav.go.set()
        assert (await client.until("session.done"))[-1]["total_sentences"] == 1


async def test_a_whole_file_per_utterance_without_stream_audio(speaking: Server) -> None:
    await speaking.replicas()
    async with session(speaking) as client:
        await client.send("input.text", text="Hello.")
        await client.send("input.done")
        start, data, _, _ = await client.until("session.done")
    assert start["format"] == "wav"
    with wave.open(io.BytesIO(data)) as file:
        assert file.getnframes() == SAMPLES


async def test_base64_frames(speaking: Server) -> None:
    await speaking.replicas()
    async with session(speaking, response_format="pcm", stream_audio=True, audio_encoding="base64") as client:
        await client.send("input.text", text="Hello.")
        await client.send("input.done")
        got = await client.until("session.done")
    chunks = [m for m in got if m["type"] == "audio.chunk"]
    assert [c["chunk_id"] for c in chunks] == [0, 1, 2]
    assert sum(len(base64.b64decode(c["audio_b64"])) for c in chunks) == SAMPLES * 2


async def test_sentences_are_spoken_in_order_each_with_its_own_start_and_done(speaking: Server) -> None:
    _, talker, _ = await speaking.replicas()
    async with session(speaking, split_granularity="sentence") as client:
        await client.send("input.text", text="This is the first one, really. And this is ")
        await client.send("input.text", text="the second one.")
        await client.send("input.done")
        got = await client.until("session.done")
    starts = [m for m in got if isinstance(m, dict) and m["type"] == "audio.start"]
    assert [(s["sentence_index"], s["sentence_text"]) for s in starts] == [
        (0, "This is the first one, really."),
        (1, "And this is the second one."),
    ]
    assert got[-1]["total_sentences"] == 2
    await eventually(lambda: len(talker.submits) == 2)
    assert [s.inputs["text"] for s in talker.submits.values()] == [s["sentence_text"] for s in starts]


async def test_a_connection_speaks_utterance_after_utterance(speaking: Server) -> None:
    """input.done flushes; the connection stays, and takes another configuration in between."""
    await speaking.replicas()
    async with session(speaking) as client:
        for i, audio_format in enumerate(("wav", "flac")):
            await client.send("session.config", response_format=audio_format)
            await client.send("input.text", text="Hello.")
            await client.send("input.done")
            start, data, done, end = await client.until("session.done")
            assert (start["utterance_index"], done["utterance_index"], end["utterance_index"]) == (i, i, i)
            assert data[:4] == (b"RIFF", b"fLaC")[i]
        await client.send("input.done")
        assert (await client.receive()) == {"type": "session.done", "utterance_index": 2, "total_sentences": 0}
        await client.send("session.close")
        assert await client.closed() == ([], 1000)


async def test_close_waits_for_what_was_flushed(speaking: Server) -> None:
    await speaking.replicas()
    async with session(speaking) as client:
        await client.send("input.text", text="Hello.")
        await client.send("input.done")
        await client.send("session.close")
        got, code = await client.closed()
    assert types(got) == ["audio.start", "bytes", "audio.done", "session.done"]
    assert code == 1000


@pytest.mark.parametrize("sent", [0, 1, 2, 4])
async def test_disconnect_aborts(speaking: Server, sent: int) -> None:
    """R16: after any number of outputs."""
    _, talker, code2wav = await speaking.replicas(talker={"hold_after": min(sent, 2)}, code2wav={"hold_after": sent})
    async with session(speaking, response_format="pcm", stream_audio=True) as client:
        await client.send("input.text", text="Hello.")
        for fake in (talker, code2wav):
            await asyncio.wait_for(fake.held.wait(), 5)
    await eventually(lambda: speaking.orchestrator.unfinished == 0)
    assert speaking.bound == 0
    assert talker.aborts
    assert code2wav.aborts


async def test_an_error_of_one_utterance_leaves_the_connection(speaking: Server) -> None:
    def breaking(request: str) -> list[control.StageMessage]:
        return [
            control.ClientAudio(request, b"\0" * 400, 24_000, 1),
            control.StageFailed(request, "EngineError", "boom"),
        ]

    _, _, code2wav = await speaking.replicas(code2wav={"script": breaking})
    async with session(speaking, response_format="pcm", stream_audio=True) as client:
        await client.send("input.text", text="Hello.")
        await client.send("input.done")
        _, _, error, done, _ = await client.until("session.done")
        assert "boom" in error["message"]
        assert (error["code"], error["partial_audio"]) == ("EngineError", True)
        assert done["error"] is True
        code2wav.script = None
        await client.send("input.text", text="Again.")
        await client.send("input.done")
        assert types(await client.until("session.done"))[-2:] == ["audio.done", "session.done"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param({"voice": "../x"}, ["voice"], id="voice is no path (R58)"),
        pytest.param({"voice": "nova"}, ["voice", "nova", "heart"], id="unknown voice"),
        pytest.param({"response_format": "aac"}, ["response_format", "aac"], id="format"),
        pytest.param({"stream_audio": True}, ["stream_audio", "pcm"], id="streamed wav"),
        pytest.param({"split_granularity": "word"}, ["split_granularity", "word"], id="granularity"),
        pytest.param({"model": "other"}, ["other", "test-omni"], id="model"),
        pytest.param({"word_timestamps": True}, ["word_timestamps"], id="timestamps"),
        pytest.param({"speed": 2.0}, ["speed", "one speed"], id="speed"),
    ],
)
async def test_a_bad_configuration_ends_the_handshake(
    speaking: Server, config: dict[str, Any], words: list[str]
) -> None:
    await speaking.replicas(talker={"voices": ("heart",)})
    async with session(speaking, **config) as client:
        (error,), code = await client.closed()
    assert code == 1008
    assert error["type"] == "error"
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize("first", ['{"type": "input.text", "text": "x"}', "{", "[]", b"\x00"])
async def test_the_first_message_is_the_configuration(speaking: Server, first: str | bytes) -> None:
    async with session(speaking, configure=False) as client:
        await client.socket.send(first)
        (error,), code = await client.closed()
    assert (code, error["type"]) == (1008, "error")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("{", ["not JSON"]),
        ("[]", ["not an object"]),
        ('{"type": "input.audio"}', ["input.audio", "input.text"]),
        ('{"type": "input.text"}', ["text", "missing"]),
        ('{"type": "input.text", "text": 7}', ["text", "7"]),
    ],
)
async def test_a_bad_message_is_told_and_survived(speaking: Server, message: str, words: list[str]) -> None:
    await speaking.replicas()
    async with session(speaking) as client:
        await client.socket.send(message)
        error = await client.receive()
        for word in words:
            assert word in error["message"]
        await client.send("input.text", text="Hello.")
        await client.send("session.config", response_format="mp3")
        assert "utterance is open" in (await client.receive())["message"]
        await client.send("input.done")
        assert types(await client.until("session.done"))[-1] == "session.done"


async def test_a_message_that_is_too_large_ends_the_connection(speaking: Server) -> None:
    async with session(speaking) as client:
        await client.send("input.text", text="x" * (129 << 10))
        _, code = await client.closed()
    assert code == 1009


async def test_text_that_nobody_can_speak_in_time_ends_the_connection(speaking: Server) -> None:
    await speaking.replicas(talker={"hold_after": 0}, code2wav={"hold_after": 0})
    async with session(speaking) as client:
        for _ in range(3):
            await client.send("input.text", text="word " * 15_000)
        got, code = await client.closed()
    assert code == 1009
    assert "characters wait" in got[-1]["message"]
    await eventually(lambda: speaking.orchestrator.unfinished == 0)


@pytest.mark.parametrize("configure", [True, False])
async def test_a_silent_client_is_given_up(tmp_path: Path, configure: bool) -> None:
    patience = Patience(session_config=0.1, session_idle=0.1)
    async with (
        a_server(tmp_path / "curve", first_edge=PayloadContract.TEXT_SEGMENTS, patience=patience) as server,
        session(server, configure=configure) as client,
    ):
        (error,), code = await client.closed()
    assert code == 1008
    assert ("no message" if configure else "no session.config") in error["message"]


async def test_a_client_that_waits_for_its_speech_is_not_silent(tmp_path: Path) -> None:
    patience = Patience(session_idle=0.05)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            a_server(tmp_path / "curve", first_edge=PayloadContract.TEXT_SEGMENTS, patience=patience)
        )
        _, talker, code2wav = await server.replicas(talker={"hold_after": 0}, code2wav={"hold_after": 0})
        client = await stack.enter_async_context(session(server))
        await client.send("input.text", text="Hello.")
        await client.send("input.done")
        await asyncio.wait_for(talker.held.wait(), 5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):  # six times its patience, and nothing comes
                await client.socket.recv()
        talker.go.set()
        code2wav.go.set()
        assert types(await client.until("session.done"))[-1] == "session.done"


async def test_a_pipeline_that_speaks_no_text_says_so(server: Server) -> None:
    async with session(server) as client:
        (error,), code = await client.closed()
    assert code == 1008
    assert "smol_omni" in error["message"]
