"""Clients that read one byte a second, or nothing: they hold up nobody, and end with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from omni_runtime.errors import StreamClosed
from omni_runtime.orchestrator import calls
from omni_runtime.protocol import control
from omni_runtime.serving.context import Patience
from omni_runtime.topology.types import PayloadContract
from tests.unit.orchestrator.conftest import a_call, eventually
from tests.unit.orchestrator.fake_stage import tone
from tests.unit.serving.conftest import Server, a_server

PIECES = 60  # of 10 s each: more than the buffers of two sockets take


def much_audio(request: str) -> list[control.StageMessage]:
    pieces: list[control.StageMessage] = [control.ClientAudio(request, tone(10.0), 24_000, 1) for _ in range(PIECES)]
    return [control.StageStarted(request), *pieces, control.StageFinished(request, "stop")]


@asynccontextmanager
async def a_slow_reader(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[socket.socket]:
    """A connection with a small window that has sent its request and reads nothing by itself."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: entry\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, head.encode() + data)
        yield client


async def one_byte_at_a_time(client: socket.socket) -> None:
    """Until the server is through with us."""
    loop = asyncio.get_running_loop()
    clock = asyncio.Event()  # never set
    while await loop.sock_recv(client, 1):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(clock.wait(), 0.05)


@pytest.fixture
async def impatient(tmp_path: Path) -> AsyncIterator[Server]:
    options = {"first_edge": PayloadContract.TEXT_SEGMENTS, "patience": Patience(send=0.3)}
    async with a_server(tmp_path / "curve", **options) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "modalities": ["audio"], "stream": True},
        ),
        ("/v1/audio/speech", {"input": "x", "stream_format": "audio", "response_format": "pcm"}),
        ("/v1/responses", {"input": "x", "modalities": ["audio"], "stream": True}),
    ],
)
async def test_one_byte_a_time_ends_the_request_and_holds_up_nobody(
    impatient: Server,
    path: str,
    body: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(calls, "MAX_BACKLOG_BYTES", 1 << 40)
    *_, code2wav = await impatient.replicas(code2wav={"script": much_audio, "hold_after": PIECES})
    port = await impatient.listen()
    async with a_slow_reader(port, path, body) as client:
        reading = asyncio.create_task(one_byte_at_a_time(client))
        await asyncio.wait_for(code2wav.held.wait(), 10)
        assert (await impatient.chat()).status_code == 200  # another client, meanwhile
        await eventually(lambda: code2wav.aborts, seconds=10)
        reading.cancel()
    assert set(code2wav.aborts.values()) == {"slow_client"}
    await eventually(lambda: impatient.orchestrator.unfinished == 0)


async def test_a_large_whole_answer_does_not_wait_for_ever(
    impatient: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "MAX_BACKLOG_BYTES", 1 << 40)
    await impatient.replicas(code2wav={"script": much_audio})
    port = await impatient.listen()
    with caplog.at_level(logging.WARNING):
        async with a_slow_reader(port, "/v1/audio/speech", {"input": "x", "response_format": "pcm"}):
            await eventually(lambda: "request.slow_client" in caplog.messages, seconds=20)


async def test_a_websocket_that_reads_nothing(impatient: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_BACKLOG_BYTES", 1 << 40)
    _, _, code2wav = await impatient.replicas(code2wav={"script": much_audio, "hold_after": PIECES})
    port = await impatient.listen()
    async with connect(f"ws://127.0.0.1:{port}/v1/audio/speech/stream", compression=None, max_queue=1) as client:
        await client.send(json.dumps({"type": "session.config", "response_format": "pcm", "stream_audio": True}))
        await client.send(json.dumps({"type": "input.text", "text": "Hello."}))
        await eventually(lambda: code2wav.aborts, seconds=10)
        assert set(code2wav.aborts.values()) == {"slow_client"}
        client.transport.abort()
    await eventually(lambda: impatient.orchestrator.unfinished == 0)


async def test_outputs_that_nobody_takes_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of one request, whatever its stages make of it."""
    monkeypatch.setattr(calls, "MAX_BACKLOG_BYTES", 5_000_000)
    *_, code2wav = await server.replicas(code2wav={"script": much_audio, "hold_after": PIECES})
    handle = server.orchestrator.submit(a_call("audio"))
    await eventually(lambda: handle.ended)
    assert handle.backlog < 5_000_000 + len(tone(10.0))
    with pytest.raises(StreamClosed, match="reads too slowly"):
        async for _ in handle.outputs():
            pass
    assert handle.backlog == 0
    await eventually(lambda: code2wav.aborts)
    assert set(code2wav.aborts.values()) == {"slow_client"}


@pytest.mark.parametrize("sent", [b"", b"{", b'{"messages": ['])
async def test_a_body_that_never_ends_is_given_up(tmp_path: Path, sent: bytes) -> None:
    """Half-sent requests cost a descriptor and memory each, for as long as they like."""
    async with a_server(tmp_path / "curve", patience=Patience(body_piece=0.2)) as server:
        port = await server.listen()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: entry\r\ncontent-length: 1000\r\n\r\n" + sent)
        answer = await asyncio.wait_for(reader.read(), 10)  # to the end: the server closes
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert f"{len(sent)} bytes came".encode() in answer


async def test_a_body_that_trickles_is_given_up(tmp_path: Path) -> None:
    """Each piece in time, and yet for ever."""
    async with a_server(tmp_path / "curve", patience=Patience(body=0.5)) as server:
        port = await server.listen()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: entry\r\ncontent-length: 100000\r\n\r\n")

        async def trickle() -> None:
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        answer = await asyncio.wait_for(reader.readuntil(b"}"), 10)
        trickling.cancel()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_compressed_bodies_are_refused_by_name(server: Server) -> None:
    """Read as JSON they would be "invalid character (byte 0)"; unpacked, a bomb."""
    answer = await server.http.post("/v1/chat/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert answer.json()["error"]["message"] == "content-encoding: 'gzip' is not read; send the JSON uncompressed"
