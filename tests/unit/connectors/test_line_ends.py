"""The line where an end breaks the rules, goes, or is one of many; and streams whose chunks take either way at random."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random

import numpy as np
import pytest

from omni_runtime.connectors import ipc, wire
from omni_runtime.connectors.api import ChunkReceived
from omni_runtime.connectors.ipc import claim
from omni_runtime.connectors.line import Lines
from omni_runtime.connectors.payloads import describe
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.connectors.wire import INLINE_BYTES, WINDOW_PIECES
from omni_runtime.errors import OmniError, StreamClosed
from tests.unit.connectors.kit import (
    EDGE,
    FULL,
    Pair,
    Site,
    a_chunk,
    a_failure,
    a_pair,
    has_line,
    producer,
    rows,
    some_bytes,
    until,
    until_failure,
    whole_stream,
)
from tests.unit.connectors.line_kit import (
    LARGE,
    SMALL,
    a_paired_stream,
    a_reader_that_pauses,
    exact,
    lines,
    put_small,
)


async def test_full_payload_edges_over_the_line(site: Site) -> None:
    """R1: more chunks than any window, all together at the end."""
    async with a_pair(site, "same pod") as pair:
        await pair.down.open("r", producer(pair.up, edge=FULL))
        await pair.up.put("r", FULL, rows(some_bytes(SMALL, 0)))
        await until(lambda: has_line(pair.up, "r", FULL))
        count = 4 * WINDOW_PIECES
        for n in range(1, count):
            await pair.up.put("r", FULL, rows(some_bytes(SMALL, n), start=n, finished=n == count - 1))
        assert exact(await whole_stream(pair.down)) == list(range(count))
        await pair.nothing_left()


async def test_a_producer_that_ignores_its_window_is_cut_off(site: Site) -> None:
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        stream = pair.up._sender._streams["r", EDGE]
        assert stream.line is not None
        header = describe(rows(some_bytes(SMALL)))
        with a_reader_that_pauses(pair.down):
            for n in range(1, WINDOW_PIECES + 2):
                assert lines(pair.up).send(*stream.line, stream.number, n, header, bytes(SMALL))
            lines(pair.up).flush()
            lines(pair.down).drain()
        events = [e async for e in until_failure(pair.down)]
        assert (events[-1].code, "window" in events[-1].message) == ("ProtocolError", True)
        assert len(events) == WINDOW_PIECES + 1
        with pytest.raises(StreamClosed):
            await until(lambda: stream.error is not None)
            await put_small(pair, 1)
        await pair.nothing_left()


async def test_a_chunk_on_the_line_puts_the_deadline_off(site: Site) -> None:
    """R5: a stream whose chunks all come this way is no silent one."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        (stream,) = pair.down._receiver._streams.values()
        stream.due = asyncio.get_running_loop().time() + 60
        before = stream.due
        await put_small(pair, 1)
        await a_chunk(pair.down)
        assert stream.due > before


async def test_nobody_reaches_a_stream_without_its_token(site: Site) -> None:
    """R62: wrong token, token of a stream that is over, half a datagram, noise: as if nothing had come."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair, "old")
        ((stale, _),) = pair.down._receiver._tokens.items()
        await pair.down.cleanup("old")
        await a_paired_stream(pair)
        ((token, _),) = pair.down._receiver._tokens.items()
        session, told = pair.up._sender._streams["r", EDGE].line or (0, 0)
        assert told == token
        forger, _ = await claim(pair.hosts[0].options.ipc_dir / "sidecar.sock", session, 5)
        tensors = describe(rows(np.zeros(8, np.uint8))).tensors

        def direct(token: int, *, length: int = 8, more: tuple[object, ...] = ()) -> bytes:
            return wire.encode([(1, token, 99, 1, 1, 1, 8, 0.0, tensors, {}, bytes(length), *more)])

        for datagram in (
            direct(stale),
            direct(token ^ 1),
            direct(0),
            direct(token, length=4),
            direct(token, more=(True,)),
            wire.encode([]),
            wire.encode([(2, token, 1, 1)] * 9),
            direct(token)[1:],
            direct(token)[:-1],
            direct(token)[:20],
            b"",
            b"\xff" * 40,
            b"\x91" * 40_000,
            b"".join(ipc.frame(wire.Ping())),
        ):
            os.write(forger, datagram)
        await put_small(pair, 1)
        assert exact([await a_chunk(pair.down)]) == [1], "the line goes on"
        await put_small(pair, 2, 3, finished=True)
        assert exact(await whole_stream(pair.down)) == [2, 3]
        os.close(forger)
        with pytest.raises((ConnectionError, ProtocolError)):
            await claim(pair.hosts[0].options.ipc_dir / "sidecar.sock", 999, 5)


async def test_a_consumer_that_goes_takes_its_line_along(site: Site) -> None:
    async with site.sidecar() as host, host.engine("thinker-0") as up:
        async with host.engine("talker-0") as down:
            await a_paired_stream(Pair(up, down, (host,)))
            (gone,) = lines(up)._out
        with pytest.raises(StreamClosed, match="gone"):
            await put_small(Pair(up, down, (host,)), *range(1, 10 * WINDOW_PIECES))
        async with host.engine("talker-1") as down:
            pair = Pair(up, down, (host,))
            await a_paired_stream(pair, "s")
            assert not lines(up).leads_to(gone), "the descriptor of the dead one is closed"
            await put_small(pair, *range(1, 10), finished=True, request="s")
            assert exact(await whole_stream(down)) == list(range(1, 10))
            await pair.nothing_left()


async def test_a_sidecar_that_goes_ends_the_streams_on_the_line(site: Site) -> None:
    """R11: both ends are told; with the next sidecar there is a line again."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        await put_small(pair, 1)
        assert (await a_chunk(pair.down)).seq == 1
        await pair.hosts[0].sidecar.close()
        assert (await a_failure(pair.down)).code == "UpstreamLost"
        with pytest.raises(OmniError, match="sidecar is gone"):
            await put_small(pair, *range(2, 4 * WINDOW_PIECES))
        assert not pair.down._receiver._tokens
        async with site.sidecar() as host:
            await pair.up.connect(20)
            await pair.down.connect(20)
            await a_paired_stream(Pair(pair.up, pair.down, (host,)), "s")


async def test_lines_leave_no_descriptor(site: Site) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):
        async with a_pair(site, "same pod") as pair:
            await a_paired_stream(pair)
            await pair.up.abort("r")
            assert (await a_failure(pair.down)).code == "UpstreamLost"
    await until(lambda: descriptors() <= before)


async def test_lines_to_engines_that_are_gone_are_closed(site: Site) -> None:
    """Though nothing was put to them any more: a producer outlives many consumers."""
    async with site.sidecar() as host, host.engine("thinker-0") as up:
        for n in range(4):
            async with host.engine(f"talker-{n}") as down:
                await a_paired_stream(Pair(up, down, (host,)), f"r{n}")
                assert sum(map(lines(up).leads_to, lines(up)._out)) == 1
                gone = lines(down)
            await until(lambda: gone._closed)  # noqa: B023 - waited for here


ANY_MODE = pytest.mark.parametrize("mode", ["same pod", "two pods", "mooncake"])


async def run_any_way(site: Site, monkeypatch: pytest.MonkeyPatch, mode: str, count: int, seed: int) -> None:
    """Many streams at once whose chunks take either way at random, while the consumer's reader comes and goes, and some
    of which either side gives up: byte-exact or ended with a reason.
    """
    dice = random.Random(seed)
    write = Lines._write
    monkeypatch.setattr(Lines, "_write", lambda *a: dice.random() < 0.7 and write(*a))
    sizes = (0, 10, SMALL, INLINE_BYTES, LARGE)
    ways: set[bool] = set()
    send = Lines.send
    monkeypatch.setattr(Lines, "send", lambda *a: ways.add(done := send(*a)) or done)
    async with a_pair(site, mode) as pair:
        chunks = {f"r{n}": [dice.choice(sizes) for _ in range(dice.randrange(1, 60))] for n in range(count)}
        given_up = {name: dice.choice(("up", "down")) for name in chunks if dice.random() < 0.2}
        got = dict.fromkeys(chunks, 0)
        open_ = set(chunks)
        everything = asyncio.Event()

        async def feed(name: str) -> None:
            await asyncio.sleep(dice.random() / 20)
            with contextlib.suppress(OmniError):
                for n, size in enumerate(chunks[name]):
                    last = n == len(chunks[name]) - 1
                    await pair.up.put(name, EDGE, rows(some_bytes(size, n), start=n, finished=last))
                    if name in given_up and dice.random() < 0.1:
                        await getattr(pair, given_up[name]).abort(name)
                        if given_up[name] == "down":
                            end(name)
                        return

        def end(name: str) -> None:
            open_.discard(name)
            if not open_:
                everything.set()

        async def collect() -> None:
            async for event in pair.down.events():
                assert event.request in open_, "nothing follows the end"
                if isinstance(event, ChunkReceived):
                    assert event.seq == got[event.request], "in order, nothing left out, nothing twice"
                    size = chunks[event.request][event.seq]
                    assert np.array_equal(event.payload.tensors["rows"], some_bytes(size, event.seq))
                    got[event.request] += 1
                else:
                    assert event.request in given_up, event
                if not isinstance(event, ChunkReceived) or event.payload.finished:
                    end(event.request)

        async def distract() -> None:
            while True:
                with a_reader_that_pauses(pair.down):
                    await asyncio.sleep(dice.random() / 50)
                await asyncio.sleep(dice.random() / 50)

        for name in chunks:
            await pair.down.open(name, producer(pair.up))
        others = [asyncio.create_task(collect()), asyncio.create_task(distract())]
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for name in chunks:
                group.create_task(feed(name))
            done = group.create_task(everything.wait())
            await asyncio.wait((done, *others), return_when=asyncio.FIRST_COMPLETED)
            for task in others:
                if task.done():
                    task.result()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        del others, task  # their frames hold the last event
        assert all(got[name] == len(chunks[name]) for name in chunks if name not in given_up)
        assert ways == {True, False}
        await pair.nothing_left()


@ANY_MODE
async def test_streams_are_exact_whichever_way_their_chunks_take(
    site: Site, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """R18, R19, R23."""
    await run_any_way(site, monkeypatch, mode, 40, seed=1)


@pytest.mark.long
@pytest.mark.timeout(600)
@ANY_MODE
@pytest.mark.parametrize("seed", range(2, 12))
async def test_many_streams_are_exact_whichever_way_their_chunks_take(
    site: Site, monkeypatch: pytest.MonkeyPatch, mode: str, seed: int
) -> None:
    await run_any_way(site, monkeypatch, mode, 400, seed)
