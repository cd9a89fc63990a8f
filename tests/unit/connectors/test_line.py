"""The line from engine to engine: small chunks that no sidecar sees. In order with the others, or a reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import pytest

from omni_runtime.connectors import ipc, wire
from omni_runtime.connectors.api import ChunkReceived
from omni_runtime.connectors.client import ClientLimits, SidecarEdgeClient
from omni_runtime.connectors.engine_session import EngineSession
from omni_runtime.connectors.ipc import claim
from omni_runtime.connectors.line import Direct, Lines, Room, Source
from omni_runtime.connectors.payloads import describe
from omni_runtime.connectors.sender import Sender
from omni_runtime.connectors.streams import Key
from omni_runtime.connectors.wire import INLINE_BYTES, WINDOW_PIECES, ProtocolError
from omni_runtime.errors import DeadlineExceeded, OmniError, StreamClosed
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
    put_many,
    rows,
    some_bytes,
    take,
    until,
    whole_stream,
)

SMALL = 1000
LARGE = 100_000  # through the arena


def lines(client: SidecarEdgeClient) -> Lines:
    attachment = client._current()
    assert attachment is not None and attachment.lines is not None
    return attachment.lines


async def a_paired_stream(pair: Pair, request: str = "r") -> None:
    """With its first chunk taken."""
    await pair.down.open(request, producer(pair.up))
    await pair.up.put(request, EDGE, rows(some_bytes(SMALL, 0)))
    assert (await a_chunk(pair.down)).seq == 0
    await until(lambda: has_line(pair.up, request))


async def put_small(pair: Pair, *seqs: int, finished: bool = False, request: str = "r") -> None:
    for n in seqs:
        last = finished and n == seqs[-1]
        await pair.up.put(request, EDGE, rows(some_bytes(SMALL, n), start=n, finished=last))


def exact(chunks: list[ChunkReceived], size: int = SMALL) -> list[int]:
    assert all(np.array_equal(c.payload.tensors["rows"], some_bytes(size, c.seq)) for c in chunks)
    return [c.seq for c in chunks]


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


@contextmanager
def a_reader_that_pauses(client: SidecarEdgeClient) -> Iterator[None]:
    """Its loop does not come to the line; what the sidecar sends it still hears."""
    reading = lines(client)
    reading._loop.remove_reader(reading._in)
    try:
        yield
    finally:
        if not reading._closed:
            reading._loop.add_reader(reading._in, reading._read, 16)


async def test_small_chunks_do_not_go_through_the_sidecar(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """R19, R23: all of them come, once and in order; only the first, before there was a line, and the last pass it. Nor
    does what the consumer has taken.
    """
    heard: list[str] = []
    hear = EngineSession.on_frame
    monkeypatch.setattr(EngineSession, "on_frame", lambda *a: heard.append(name_of(a[1])) or hear(*a))
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        await put_small(pair, 1)
        assert exact([await a_chunk(pair.down)]) == [1]
        await until(lambda: has_line_back(pair.down))
        async with a_stuck_sidecar(monkeypatch) as waiting:
            heard.clear()
            for n in range(2, 3 * WINDOW_PIECES):
                await put_small(pair, n)
                assert exact([await a_chunk(pair.down)]) == [n]
            assert not waiting
            assert set(heard) <= {"Bypassed"}
            await put_small(pair, 3 * WINDOW_PIECES, finished=True)
            await until(lambda: len(waiting) == 1)
            assert len(pair.hosts[0].sidecar.hub.table) == 0, "told of all that went past it"
            with pytest.raises(TimeoutError):
                await take(pair.down, 1, 0.2)
        assert (await a_chunk(pair.down)).payload.finished
        assert not pair.down._receiver._tokens
        await pair.nothing_left()


def name_of(header: bytes) -> str:
    return type(wire.decode_from_engine(header)).__name__


def has_line_back(client: SidecarEdgeClient) -> bool:
    return any(line >= 0 for line in lines(client)._out.values())


async def test_what_was_taken_is_told_by_the_sidecar_where_no_line_goes_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lines, "give_room", lambda *_: False)
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        for n in range(1, 4 * WINDOW_PIECES):
            await put_small(pair, n, finished=n == 4 * WINDOW_PIECES - 1)
            assert exact([await a_chunk(pair.down)]) == [n]
        await pair.nothing_left()


async def test_nobody_gives_room_to_a_stream_without_its_token(site: Site) -> None:
    """R62: nor more than a window."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        await put_small(pair, 1, 2, 3)
        stream = pair.up._sender._streams["r", EDGE]
        assert stream.line is not None
        free, token = stream.credits, stream.line[1]
        session = stream.attachment.attached.session
        forger = await claim(pair.hosts[0].options.ipc_dir / "sidecar.sock", session, 5)
        for room in (
            Room(token ^ 1, stream.number, 1),
            Room(token, stream.number + 1, 1),
            Room(token, stream.number, 17),
        ):
            os.write(forger, wire.encode(room))
        lines(pair.up).drain()
        assert stream.credits == free
        os.write(forger, wire.encode(Room(token, stream.number, 1)))
        lines(pair.up).drain()
        assert stream.credits == free + 1
        os.close(forger)


async def test_the_sidecar_counts_what_goes_past_it(site: Site) -> None:
    """Every chunk by its own size, at the latest before the stream ends."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        await put_small(pair, *range(1, 8))
        labels = 'from_replica="thinker-0",from_stage="thinker",model_name="x",to_replica="talker-0",to_stage="talker"'

        def counted(nbytes: int, chunks: int) -> bool:
            text = pair.hosts[0].sidecar.metrics.render().decode()
            return (
                f'omni:connector_bytes_total{{connector="SharedMemory",{labels}}} {nbytes}.0' in text
                and f'omni:connector_chunks_total{{connector="SharedMemory",{labels}}} {chunks}.0' in text
                and f"vllm_omni:transfer_size_bytes_count{{{labels}}} {chunks}.0" in text
                and f"vllm_omni:transfer_tx_s_count{{{labels}}} {chunks}.0" in text
                and f"vllm_omni:transfer_in_flight_s_count{{{labels}}} {chunks}.0" in text
            )

        await until(lambda: counted(8 * SMALL, 8))  # without any other message of the stream
        await put_small(pair, 8, 9, 10, finished=True)
        await until(lambda: len(pair.hosts[0].sidecar.hub.table) == 0)
        assert counted(11 * SMALL, 11)


async def test_the_sidecar_is_told_before_the_list_grows_long(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chunks go between two ticks."""
    monkeypatch.setattr(Sender, "report", lambda _: None)
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        for n in range(1, 301):
            await put_small(pair, n, finished=n == 300)
            assert (await a_chunk(pair.down)).seq == n
        await pair.nothing_left()


async def test_a_chunk_on_the_line_waits_for_those_before_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """R18: the line overtakes what the sidecar carries; no gap comes of it."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        async with a_stuck_sidecar(monkeypatch) as waiting:
            await pair.up.put("r", EDGE, rows(some_bytes(LARGE, 1), start=1))
            await put_small(pair, 2, 3)
            await pair.up.put("r", EDGE, rows(some_bytes(LARGE, 4), start=4))
            await put_small(pair, 5)
            await until(lambda: len(waiting) == 2)
            with pytest.raises(TimeoutError):
                await take(pair.down, 1, 0.2)
        got = [await a_chunk(pair.down) for _ in range(5)]
        assert [c.seq for c in got] == [1, 2, 3, 4, 5]
        await put_small(pair, 6, finished=True)
        await a_chunk(pair.down)
        del got
        await pair.nothing_left()


async def test_what_the_sidecar_brings_waits_for_the_line(site: Site) -> None:
    """R18: the other way round. A finished chunk is the last one, whoever is faster."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        with a_reader_that_pauses(pair.down):
            await put_small(pair, 1, 2)
            await pair.up.put("r", EDGE, rows(some_bytes(LARGE, 3), start=3))
            assert exact([await a_chunk(pair.down), await a_chunk(pair.down)]) == [1, 2]
            assert exact([await a_chunk(pair.down)], LARGE) == [3]
            await put_small(pair, 4, 5, 6, finished=True)
            assert exact(await whole_stream(pair.down)) == [4, 5, 6]
        await pair.nothing_left()


async def test_a_producer_may_leave_directly_after_its_last_chunk(site: Site) -> None:
    """R6, R23: what it has put is in the consumer's socket, and the end at the sidecar."""
    async with site.sidecar() as host, host.engine("talker-0") as down:
        async with host.engine("thinker-0") as up:
            await a_paired_stream(Pair(up, down, (host,)))
            with a_reader_that_pauses(down):
                await put_small(Pair(up, down, (host,)), *range(1, 9), finished=True)
                await up.close()
                assert exact(await whole_stream(down)) == list(range(1, 9))


@pytest.mark.parametrize("how", ["dies", "aborts"])
async def test_what_was_put_before_an_end_comes_before_the_reason(site: Site, how: str) -> None:
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        with a_reader_that_pauses(pair.down):
            await put_small(pair, 1, 2, 3)
            await (pair.up.close() if how == "dies" else pair.up.abort("r"))
            events = await take(pair.down, 4)
        assert exact([e for e in events if isinstance(e, ChunkReceived)]) == [1, 2, 3]
        assert events[-1].code == "UpstreamLost"  # type: ignore[union-attr]
        await pair.nothing_left()


@pytest.mark.parametrize("after", ["a large chunk", "the end"])
async def test_a_chunk_that_the_line_lost_is_a_gap_and_never_a_short_stream(
    site: Site, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """R23: cannot happen as long as both live; if it did, both ends would be told."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        with monkeypatch.context() as patch:
            patch.setattr(Lines, "_write", lambda *_: True)
            await put_small(pair, 1)
        if after == "the end":
            await put_small(pair, 2, finished=True)
        else:
            await pair.up.put("r", EDGE, rows(some_bytes(LARGE, 2), start=2))
        failed = await a_failure(pair.down)
        assert (failed.code, "gap" in failed.message) == ("ProtocolError", True)
        if after != "the end":
            with pytest.raises(StreamClosed, match="gap"):
                await until(lambda: pair.up._sender._streams["r", EDGE].error is not None)
                await put_small(pair, 3)
        await pair.nothing_left()


async def test_a_line_that_is_full_costs_its_speed_and_nothing_else(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R26: the kernel keeps so many bytes; the rest takes the usual way, and all comes in order."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        sent: list[bool] = []
        send = Lines.send
        monkeypatch.setattr(Lines, "send", lambda *a: sent.append(send(*a)) or sent[-1])
        with a_reader_that_pauses(pair.down):
            for n in range(1, WINDOW_PIECES + 1):
                await pair.up.put("r", EDGE, rows(some_bytes(INLINE_BYTES, n), start=n))
            got = [await a_chunk(pair.down) for _ in range(WINDOW_PIECES)]
        assert exact(got, INLINE_BYTES) == list(range(1, WINDOW_PIECES + 1))
        assert {True, False} == set(sent)
        await put_small(pair, WINDOW_PIECES + 1, finished=True)
        await a_chunk(pair.down)
        await pair.nothing_left()


async def test_a_slow_consumer_holds_the_line_back(site: Site) -> None:
    """At most a window is on the line, the put says after its deadline who does not take, and metrics name the edge."""
    async with a_pair(site, "same pod", up=ClientLimits(put_deadline_s=1.5)) as pair:
        table = pair.hosts[0].sidecar.hub.table
        await a_paired_stream(pair)
        await put_small(pair, *range(1, WINDOW_PIECES + 1))
        stalled = (Key("thinker-0", EDGE, "r"), "talker-0", WINDOW_PIECES)
        await until(lambda: list(table.waiting()) == [stalled])
        for n in range(1, WINDOW_PIECES + 1):
            assert exact([await a_chunk(pair.down)]) == [n]
        await until(lambda: table.stalled == 0)
        with pytest.raises(DeadlineExceeded, match=rf"{EDGE} of request r.*1.5 s"):
            await put_small(pair, *range(WINDOW_PIECES + 1, 4 * WINDOW_PIECES))
        events = [e async for e in _until_failure(pair.down)]
        assert exact(events[:-1]) == list(range(WINDOW_PIECES + 1, 2 * WINDOW_PIECES + 1))
        assert events[-1].code == "UpstreamLost"
        await pair.nothing_left()


async def _until_failure(client: SidecarEdgeClient) -> AsyncIterator:  # type: ignore[type-arg]
    async with asyncio.timeout(30):
        async for event in client.events():
            yield event
            if not isinstance(event, ChunkReceived):
                return


async def test_no_put_overtakes_one_that_waits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """R18: though there is room again by the time it is called."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        stream = pair.up._sender._streams["r", EDGE]
        given: list[tuple[Source, int, int]] = []
        monkeypatch.setattr(Lines, "give_room", lambda _, *room: given.append(room) is None)
        await put_small(pair, *range(1, WINDOW_PIECES + 1))
        waiting = asyncio.create_task(put_small(pair, WINDOW_PIECES + 1))
        got = [await a_chunk(pair.down) for _ in range(WINDOW_PIECES // 2)]
        await until(lambda: bool(given) and stream.lock.locked())
        ((source, token, pieces),) = given
        pair.up._sender.on_room(Room(token, source.stream, pieces))
        await put_small(pair, WINDOW_PIECES + 2)
        await waiting
        got += [await a_chunk(pair.down) for _ in range(WINDOW_PIECES // 2 + 2)]
        assert exact(got) == list(range(1, WINDOW_PIECES + 3))


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
            lines(pair.down).drain()
        events = [e async for e in _until_failure(pair.down)]
        assert (events[-1].code, "window" in events[-1].message) == ("ProtocolError", True)
        assert len(events) == WINDOW_PIECES + 1
        with pytest.raises(StreamClosed):
            await until(lambda: stream.error is not None)
            await put_small(pair, 1)
        await pair.nothing_left()


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
        forger = await claim(pair.hosts[0].options.ipc_dir / "sidecar.sock", session, 5)
        header = describe(rows(np.zeros(8, np.uint8)))
        final = describe(rows(np.zeros(8, np.uint8), finished=True))

        def direct(token: int, *, header: wire.ChunkHeader = header, length: int = 8) -> bytes:
            return wire.encode(Direct(token, Source(99, 1), 1, header, bytes(length)))

        for datagram in (
            direct(stale),
            direct(token ^ 1),
            direct(0),
            direct(token, length=4),
            direct(token, header=final),
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
            ((gone, writing),) = lines(up)._out.items()
        with pytest.raises(StreamClosed, match="gone"):
            await put_small(Pair(up, down, (host,)), *range(1, 10 * WINDOW_PIECES))
        assert writing >= 0
        async with host.engine("talker-1") as down:
            pair = Pair(up, down, (host,))
            await a_paired_stream(pair, "s")
            assert lines(up)._out.pop(gone) == -1, "the descriptor of the dead one is closed"
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
                assert sum(line >= 0 for line in lines(up)._out.values()) == 1
                gone = lines(down)
            await until(lambda: gone._closed)  # noqa: B023 - waited for here


async def test_streams_between_two_pods_have_no_line(site: Site) -> None:
    async with a_pair(site, "two pods") as pair:
        await pair.down.open("r", producer(pair.up))
        await put_many(pair.up, "r", 20)
        assert len(await whole_stream(pair.down)) == 20
        assert not lines(pair.up)._out
        assert not pair.down._receiver._tokens


async def run_any_way(site: Site, monkeypatch: pytest.MonkeyPatch, count: int, seed: int) -> None:
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
    async with a_pair(site, "same pod") as pair:
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


async def test_streams_are_exact_whichever_way_their_chunks_take(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """R18, R19, R23."""
    await run_any_way(site, monkeypatch, 40, seed=1)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 12))
async def test_many_streams_are_exact_whichever_way_their_chunks_take(
    site: Site, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    await run_any_way(site, monkeypatch, 400, seed)
