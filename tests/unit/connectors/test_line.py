"""The line from engine to engine: it is ahead of the sidecar's copy, and nothing depends on it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from omni_runtime.connectors import wire
from omni_runtime.connectors.client import SidecarEdgeClient
from omni_runtime.connectors.hub import EngineSession
from omni_runtime.connectors.ipc import claim
from omni_runtime.connectors.line import Lines
from omni_runtime.connectors.payloads import describe
from omni_runtime.connectors.wire import WINDOW_PIECES, ProtocolError, Put, Slab
from omni_runtime.errors import StreamClosed
from tests.unit.connectors.kit import (
    EDGE,
    Pair,
    Site,
    a_chunk,
    a_failure,
    a_pair,
    producer,
    put_many,
    rows,
    some_bytes,
    take,
    until,
    whole_stream,
)

SMALL = 1000


def lines(client: SidecarEdgeClient) -> Lines:
    attachment = client._current()
    assert attachment is not None and attachment.lines is not None
    return attachment.lines


def calm(client: SidecarEdgeClient, request: str) -> bool:
    """The line is there, and what was put has been relayed: the next chunk goes early."""
    stream = client._sender._streams[request, EDGE]
    return stream.line is not None and lines(client)._out[stream.line[0]] >= 0 and stream.credits == WINDOW_PIECES


async def a_calm_stream(pair: Pair, request: str = "r") -> None:
    await pair.down.open(request, producer(pair.up))
    await pair.up.put(request, EDGE, rows(some_bytes(SMALL, 0)))
    assert (await a_chunk(pair.down)).seq == 0
    await until(lambda: calm(pair.up, request))


@asynccontextmanager
async def a_stuck_sidecar(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Callable[[], None]]]:
    """Delivers nothing to engines until the end of the block; yields what waits."""
    waiting: list[Callable[[], None]] = []
    deliver = EngineSession.deliver
    with monkeypatch.context() as patch:
        patch.setattr(EngineSession, "deliver", lambda *a: waiting.append(lambda: deliver(*a)))
        yield waiting
    for one in waiting:
        one()


async def test_a_small_chunk_is_there_before_the_sidecar_brings_it_and_comes_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R19, R23."""
    async with a_pair(site, "same pod") as pair:
        await a_calm_stream(pair)
        async with a_stuck_sidecar(monkeypatch) as waiting:
            await pair.up.put("r", EDGE, rows(some_bytes(SMALL, 1), start=1))
            chunk = await a_chunk(pair.down)
            assert (chunk.seq, bytes(chunk.payload.tensors["rows"])) == (1, bytes(some_bytes(SMALL, 1)))
            await until(lambda: len(waiting) == 1)
        for n in range(2, 18):
            await pair.up.put("r", EDGE, rows(some_bytes(SMALL, n), start=n, finished=n == 17))
        got = await whole_stream(pair.down)
        assert [c.seq for c in got] == list(range(2, 18)), "nothing twice, nothing left out"
        del chunk, got
        await pair.nothing_left()


async def test_a_finished_chunk_on_the_line_ends_the_stream_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_pair(site, "same pod") as pair:
        await a_calm_stream(pair)
        async with a_stuck_sidecar(monkeypatch) as waiting:
            await pair.up.put("r", EDGE, rows(some_bytes(SMALL, 1), start=1, finished=True))
            assert (await a_chunk(pair.down)).payload.finished
            await until(lambda: len(waiting) == 1)
        with pytest.raises(TimeoutError):
            await take(pair.down, 1, 0.2)
        assert not pair.down._receiver._tokens
        await pair.nothing_left()


async def test_a_chunk_that_is_not_the_next_one_waits_for_the_sidecar(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line may overtake what the sidecar has sent: no gap comes of it (R18)."""
    async with a_pair(site, "same pod") as pair:
        await a_calm_stream(pair)
        stream = pair.up._sender._streams["r", EDGE]
        async with a_stuck_sidecar(monkeypatch):
            line, stream.line = stream.line, None
            await pair.up.put("r", EDGE, rows(some_bytes(SMALL, 1), start=1))
            stream.line = line
            await until(lambda: calm(pair.up, "r"))
            await pair.up.put("r", EDGE, rows(some_bytes(SMALL, 2), start=2))
            with pytest.raises(TimeoutError):
                await take(pair.down, 1, 0.2)
        assert [event.seq for event in await take(pair.down, 2)] == [1, 2]  # type: ignore[union-attr]


async def test_a_reader_that_pauses_costs_the_line_and_not_the_stream(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R26: the line is full after some datagrams; nobody waits for it."""
    async with a_pair(site, "same pod") as pair:
        await a_calm_stream(pair)
        reading = lines(pair.down)
        reading._loop.remove_reader(reading._in)
        sent: list[bool] = []
        send = Lines.send
        monkeypatch.setattr(Lines, "send", lambda *a: sent.append(send(*a)) or sent[-1])
        for n in range(1, 600):
            await pair.up.put("r", EDGE, rows(some_bytes(SMALL, n), start=n, finished=n == 599))
            chunk = await a_chunk(pair.down)
            assert chunk.seq == n
            assert np.array_equal(chunk.payload.tensors["rows"], some_bytes(SMALL, n))
            if n < 599:
                await until(lambda: calm(pair.up, "r"))
        assert sent[0] and not sent[-1], "it took some, and then no more"


async def test_nobody_reaches_a_stream_without_its_token(site: Site) -> None:
    """R62: wrong token, token of a stream that is over, a slab, half a chunk, noise: as if nothing had come."""
    async with a_pair(site, "same pod") as pair:
        await a_calm_stream(pair, "old")
        ((stale, _),) = pair.down._receiver._tokens.items()
        await pair.down.cleanup("old")
        await a_calm_stream(pair)
        ((token, _),) = pair.down._receiver._tokens.items()
        session, _ = pair.up._sender._streams["r", EDGE].line or (0, 0)
        forger = await claim(pair.hosts[0].options.ipc_dir / "sidecar.sock", session, 5)
        data = bytes(8)
        header = describe(rows(np.zeros(8, np.uint8)))

        def early(token: int, *, seq: int = 1, slab: Slab | None = None, last: bool = True, length: int = 8) -> bytes:
            put = Put(1, seq, 0, last, length, slab, header)
            return b"".join(wire.frame(wire.Early(token, put), data))

        for datagram in (
            early(stale),
            early(token ^ 1),
            early(token, seq=7),
            early(token, last=False),
            early(token, length=4),
            early(token, slab=Slab(64, 8, 1)),
            early(token)[:-1],
            early(token)[:20],
            b"",
            b"\xff" * 40,
            b"".join(wire.frame(wire.Ping())),
        ):
            os.write(forger, datagram)
        await until(lambda: calm(pair.up, "r"))
        await pair.up.put("r", EDGE, rows(some_bytes(SMALL, 1), start=1, finished=True))
        chunk = await a_chunk(pair.down)
        assert (chunk.seq, bytes(chunk.payload.tensors["rows"])) == (1, bytes(some_bytes(SMALL, 1)))
        os.close(forger)
        with pytest.raises((ConnectionError, ProtocolError)):
            await claim(pair.hosts[0].options.ipc_dir / "sidecar.sock", 999, 5)


async def test_a_consumer_that_goes_takes_its_line_along(site: Site) -> None:
    async with site.sidecar() as host, host.engine("thinker-0") as up:
        async with host.engine("talker-0") as down:
            await a_calm_stream(Pair(up, down, (host,)))
            ((session, writing),) = lines(up)._out.items()
        with pytest.raises(StreamClosed):
            for n in range(1, 10 * WINDOW_PIECES):
                await up.put("r", EDGE, rows(some_bytes(SMALL), start=n))
        assert writing >= 0
        early = Put(1, 0, 0, True, SMALL, None, describe(rows(some_bytes(SMALL))))
        assert not lines(up).send(session, 1, early, bytes(SMALL))
        assert lines(up)._out == {session: -1}
        async with host.engine("talker-1") as down:
            pair = Pair(up, down, (host,))
            await pair.down.open("s", producer(up))
            await put_many(up, "s", 20)
            assert len(await whole_stream(down)) == 20
            await pair.nothing_left()


async def test_a_sidecar_that_goes_ends_the_stream_after_the_early_chunk(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11: the chunk came, its stream is lost all the same, and with the next sidecar there is a line again."""
    async with a_pair(site, "same pod") as pair:
        await a_calm_stream(pair)
        monkeypatch.setattr(EngineSession, "deliver", lambda *_: None)
        await pair.up.put("r", EDGE, rows(some_bytes(SMALL, 1), start=1))
        assert (await a_chunk(pair.down)).seq == 1
        await pair.hosts[0].sidecar.close()
        assert (await a_failure(pair.down)).code == "UpstreamLost"
        assert not pair.down._receiver._tokens
        monkeypatch.undo()
        async with site.sidecar() as host:
            await pair.up.connect(20)
            await pair.down.connect(20)
            await a_calm_stream(Pair(pair.up, pair.down, (host,)), "s")


async def test_lines_leave_no_descriptor(site: Site) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):
        async with a_pair(site, "same pod") as pair:
            await a_calm_stream(pair)
            await pair.up.abort("r")
            assert (await a_failure(pair.down)).code == "UpstreamLost"
    await until(lambda: descriptors() <= before)
