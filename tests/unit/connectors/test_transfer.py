"""Engine -> sidecar(s) -> engine in one process: both modes, every end."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from omni_runtime.connectors.api import ChunkReceived
from omni_runtime.connectors.client import ClientLimits, SidecarEdgeClient
from omni_runtime.connectors.wire import INLINE_BYTES, WINDOW_PIECES
from omni_runtime.errors import CapacityExceeded, DeadlineExceeded, StreamClosed
from omni_runtime.protocol.payload import Payload
from tests.unit.connectors.kit import (
    EDGE,
    FULL,
    MIB,
    MODES,
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
    until_failure,
    whole_stream,
)

SIZES = (0, 1, 63, INLINE_BYTES, INLINE_BYTES + 1, 300_000, 1 * MIB, 3 * MIB + 7)


@MODES
async def test_bytes_shapes_and_order_survive(site: Site, mode: str) -> None:
    """R18, R19, R23: nothing lost, nothing twice, nothing out of order."""
    async with a_pair(site, mode) as pair:
        rng = np.random.default_rng(5)
        sent: list[Payload] = []
        for i, size in enumerate(SIZES * 3):
            tensors = {
                "bytes": some_bytes(size, i),
                "hidden": rng.standard_normal((2, i % 3, 5)).astype(("float16", "float32", "float64")[i % 3]),
                "codes": rng.integers(-9, 9, (3, 4)).T,  # not contiguous
                "embed": rng.integers(0, 1 << 16, (4, 2), dtype=np.uint16),
            }
            finished = i == len(SIZES) * 3 - 1
            sent.append(Payload(i, 1, finished, tensors, {"i": i, "voice": "ä"}, {"embed": "bfloat16"}))

        async def feed() -> None:
            for payload in sent:
                await pair.up.put("r", EDGE, payload)

        await pair.down.open("r", producer(pair.up))
        async with asyncio.TaskGroup() as group:
            group.create_task(feed())
            got = await whole_stream(pair.down)
        assert [c.seq for c in got] == list(range(len(sent)))
        for chunk, payload in zip(got, sent, strict=True):
            back = chunk.payload
            assert (back.start, back.rows, back.finished) == (payload.start, payload.rows, payload.finished)
            assert (dict(back.meta), dict(back.dtypes)) == (dict(payload.meta), dict(payload.dtypes))
            for name, array in payload.tensors.items():
                assert back.tensors[name].dtype == array.dtype
                assert np.array_equal(back.tensors[name], array), (payload.start, name)
                assert not back.tensors[name].flags.writeable
        del got, chunk, back
        await pair.nothing_left()


@MODES
async def test_a_chunk_larger_than_the_arena(site: Site, mode: str) -> None:
    async with a_pair(site, mode, arena_bytes=8 * MIB, up=ClientLimits(arena_wait_s=0.05)) as pair:
        data = some_bytes(64 * MIB)
        await pair.down.open("r", producer(pair.up))
        put = asyncio.create_task(pair.up.put("r", EDGE, rows(data, finished=True)))
        chunk = await a_chunk(pair.down, 90)
        await put
        assert np.array_equal(chunk.payload.tensors["rows"], data)
        await pair.nothing_left()


@MODES
async def test_the_consumer_may_open_late(site: Site, mode: str) -> None:
    async with a_pair(site, mode) as pair:
        for n in range(3):
            await pair.up.put("r", EDGE, rows(some_bytes(100_000, n), start=n, finished=n == 2))
        await pair.up.cleanup("r")  # the producer is done: its tail stays (R6, R23)
        await pair.down.open("r", producer(pair.up))
        got = await whole_stream(pair.down)
        assert [bytes(c.payload.tensors["rows"][:4]) for c in got] == [bytes(some_bytes(4, n)) for n in range(3)]
        del got
        await pair.nothing_left()


@MODES
async def test_full_payload_edges_deliver_at_the_end(site: Site, mode: str) -> None:
    """R1: more chunks than any window, and all of them together once the last is here."""
    async with a_pair(site, mode) as pair:
        await pair.down.open("r", producer(pair.up, edge=FULL))
        count = WINDOW_PIECES * 3
        for n in range(count - 1):
            await pair.up.put("r", FULL, rows(some_bytes(50_000, n), start=n))
        with pytest.raises(TimeoutError):
            await take(pair.down, 1, 0.2)
        await pair.up.put("r", FULL, rows(some_bytes(50_000, count), start=count - 1, finished=True))
        got = await whole_stream(pair.down)
        assert [c.payload.start for c in got] == list(range(count))
        await pair.nothing_left()


@MODES
async def test_a_slow_consumer_holds_the_producer_back(site: Site, mode: str) -> None:
    async with a_pair(site, mode, up=ClientLimits(put_deadline_s=0.3)) as pair:
        await pair.down.open("r", producer(pair.up))
        accepted = 0
        with pytest.raises(DeadlineExceeded, match=rf"{EDGE} of request r.*0.3 s"):
            for n in range(10 * WINDOW_PIECES):
                await pair.up.put("r", EDGE, rows(some_bytes(1000, n), start=n))
                accepted += 1
        assert accepted <= 2 * WINDOW_PIECES + 1
        failed = [e async for e in until_failure(pair.down)][-1]
        assert failed.code == "UpstreamLost"
        await pair.nothing_left()


@MODES
async def test_a_stream_that_waits_holds_up_no_other(site: Site, mode: str) -> None:
    async with a_pair(site, mode) as pair:
        stuck = asyncio.create_task(put_many(pair.up, "stuck", 100))
        await until(lambda: pair.hosts[0].sidecar.hub.table.queued_pieces == WINDOW_PIECES)
        for n in range(20):
            await pair.down.open(f"r{n}", producer(pair.up))
            await pair.up.put(f"r{n}", EDGE, rows(some_bytes(2000), finished=True))
            chunk = await a_chunk(pair.down)
            assert chunk.request == f"r{n}"
        await pair.up.abort("stuck")
        with pytest.raises(StreamClosed):
            await stuck
        await pair.nothing_left()


@MODES
async def test_events_are_fair_between_requests(site: Site, mode: str) -> None:
    async with a_pair(site, mode) as pair:
        for name in "ab":
            await pair.down.open(name, producer(pair.up))
        for name in "ab":
            await put_many(pair.up, name, 8)
        await until(lambda: pair.down._receiver.queued_events == 16)
        order = "".join(e.request for e in await take(pair.down, 16))
        assert "aaa" not in order
        assert "bbb" not in order


@MODES
@pytest.mark.parametrize("who", ["consumer", "producer"])
@pytest.mark.parametrize("size", [500, 200_000])
async def test_abort_at_every_chunk(site: Site, mode: str, who: str, size: int) -> None:
    """R11, R12: whoever gives up, and whenever: the other side is told and nothing stays behind."""
    chunks = 5
    async with a_pair(site, mode) as pair:
        for at in range(chunks + 1):
            request = f"r{at}"
            await pair.down.open(request, producer(pair.up))
            for n in range(at):
                await pair.up.put(request, EDGE, rows(some_bytes(size, n), start=n))
                await a_chunk(pair.down)
            if who == "consumer":
                await pair.down.abort(request)
                with pytest.raises(StreamClosed, match="cancelled"):
                    await _put_until_refused(pair.up, request, at, size)
                await pair.up.cleanup(request)
            else:
                await pair.up.put(request, EDGE, rows(some_bytes(size, at), start=at))
                await pair.up.abort(request)
                events = [e async for e in until_failure(pair.down)]
                assert events[-1].code == "UpstreamLost"
                assert len(events) <= 2
                del events
            await pair.down.cleanup(request)
            await pair.nothing_left()


async def _put_until_refused(client: SidecarEdgeClient, request: str, start: int, size: int) -> None:
    async with asyncio.timeout(30):
        while True:
            await client.put(request, EDGE, rows(some_bytes(size), start=start))
            start += 1
            await asyncio.sleep(0.002)


@MODES
async def test_abort_before_anything_was_delivered(site: Site, mode: str) -> None:
    async with a_pair(site, mode) as pair:
        await pair.up.put("r", EDGE, rows(some_bytes(200_000), finished=True))
        await pair.up.abort("r")
        await pair.nothing_left()
        with pytest.raises(StreamClosed, match="is over"):
            await pair.up.put("r", EDGE, rows(some_bytes(10)))
        await pair.down.open("r", producer(pair.up))
        assert (await a_failure(pair.down)).code == "UpstreamLost"


@MODES
async def test_arrays_live_as_long_as_they_are_held(site: Site, mode: str) -> None:
    """The slab goes back with the last reference, dropped in any thread; until then its bytes cannot change (R25)."""
    async with a_pair(site, mode, arena_bytes=4 * MIB) as pair:
        await pair.down.open("r", producer(pair.up))
        await pair.up.put("r", EDGE, rows(some_bytes(500_000, 1)))
        chunk = await a_chunk(pair.down)
        kept = [chunk.payload.tensors["rows"][10:20]]
        del chunk
        await pair.down.cleanup("r")
        await pair.up.cleanup("r")
        await asyncio.sleep(0.05)
        assert pair.hosts[-1].arena_used >= 500_000
        for n in range(20):  # other requests fill and reuse the arena
            await pair.down.open(f"s{n}", producer(pair.up))
            await pair.up.put(f"s{n}", EDGE, rows(some_bytes(700_000, 100 + n), finished=True))
            await a_chunk(pair.down)
        assert np.array_equal(kept[0], some_bytes(500_000, 1)[10:20])
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
        await pair.nothing_left()


@MODES
async def test_holding_everything_never_starves_the_arena(site: Site, mode: str) -> None:
    """Past a share of the arena chunks are copied out, so an engine that keeps its rows blocks nobody."""
    async with a_pair(site, mode, arena_bytes=4 * MIB) as pair:
        await pair.down.open("r", producer(pair.up))
        held: list[ChunkReceived] = []
        for n in range(30):
            await pair.up.put("r", EDGE, rows(some_bytes(400_000, n), start=n, finished=n == 29))
            held.append(await a_chunk(pair.down))
        assert all(np.array_equal(c.payload.tensors["rows"], some_bytes(400_000, c.seq)) for c in held)
        await until(lambda: pair.hosts[-1].arena_used <= 1.5 * MIB)
        held.clear()
        await pair.nothing_left()


@MODES
async def test_a_full_arena_spills_and_says_so(site: Site, mode: str) -> None:
    async with a_pair(site, mode, arena_bytes=1 * MIB, up=ClientLimits(arena_wait_s=0.05)) as pair:
        await put_many(pair.up, "r", 12, 200_000)
        assert b"omni:connector_spilled_pieces_total 0.0" not in pair.hosts[0].sidecar.metrics.render()
        await pair.down.open("r", producer(pair.up))
        got = await whole_stream(pair.down)
        assert all(np.array_equal(c.payload.tensors["rows"], some_bytes(200_000, c.seq)) for c in got)
        del got
        await pair.nothing_left()


@MODES
async def test_an_upstream_that_says_nothing_fails_at_the_deadline(site: Site, mode: str) -> None:
    """R5: no consumer waits for ever."""
    async with a_pair(site, mode, down=ClientLimits(chunk_deadline_s=0.3)) as pair:
        await pair.down.open("r", producer(pair.up))
        failed = await a_failure(pair.down)
        assert (failed.code, failed.request) == ("DeadlineExceeded", "r")
        assert "0.3 s" in failed.message
        await pair.nothing_left()


@MODES
async def test_the_janitor_frees_what_nobody_opens(site: Site, mode: str) -> None:
    async with a_pair(site, mode, lease_seconds=0.3) as pair:
        await pair.up.put("r", EDGE, rows(some_bytes(200_000), finished=True))
        await pair.nothing_left()


@MODES
async def test_a_dead_engine_is_told_to_the_other(site: Site, mode: str) -> None:
    async with a_pair(site, mode) as pair:
        await pair.down.open("r", producer(pair.up))
        await pair.up.put("r", EDGE, rows(some_bytes(200_000)))
        await a_chunk(pair.down)
        await pair.up.close()
        assert (await a_failure(pair.down)).code == "UpstreamLost"
        await pair.nothing_left()


async def test_a_dead_sidecar_of_another_pod_is_told_at_once(site: Site) -> None:
    async with site.sidecar("pod-b") as near:
        async with site.sidecar("pod-a") as far, far.engine("thinker-0") as up, near.engine("talker-0") as down:
            await down.open("r", producer(up))
            await up.put("r", EDGE, rows(some_bytes(200_000)))
            await a_chunk(down)
            await far.sidecar.close()
            failed = await a_failure(down, 5)
            assert failed.code == "UpstreamLost"
        await until(lambda: near.arena_used == 0 and len(near.sidecar.links) == 0)


async def test_a_link_that_the_producers_side_gave_up_fails_at_once(site: Site) -> None:
    """A consumer's sidecar that was only slow is alive, but its streams are gone: it must not wait for ever (R5)."""
    async with a_pair(site, "two pods") as pair:
        await pair.down.open("r", producer(pair.up))
        await pair.up.put("r", EDGE, rows(some_bytes(1000)))
        await a_chunk(pair.down)
        for peer in list(pair.hosts[0].sidecar.listener._peers):
            peer.channel.close("nothing heard")
        failed = [e async for e in until_failure(pair.down)][-1]
        assert failed.code == "UpstreamLost"
        assert "connection closed" in failed.message
        await pair.nothing_left()


async def test_an_unreachable_pod_fails_with_its_address(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_runtime.connectors.peer_link.CONNECT_SECONDS", 0.5)
    async with a_pair(site, "same pod") as pair:
        far = producer(pair.up)
        gone = type(far)(far.edge, far.stage, far.replica, "tcp://127.0.0.1:1", "elsewhere")
        await pair.down.open("r", gone)
        failed = await a_failure(pair.down, 5)
        assert failed.code == "UpstreamLost"
        assert "tcp://127.0.0.1:1" in failed.message


@pytest.mark.parametrize("endpoint", ["ipc:///etc/passwd", "inproc://x", "tcp://a:99999", "tcp://a b:1", ""])
async def test_only_tcp_endpoints_are_dialled(site: Site, endpoint: str) -> None:
    async with a_pair(site, "same pod") as pair:
        far = producer(pair.up)
        await pair.down.open("r", type(far)(far.edge, far.stage, far.replica, endpoint, "elsewhere"))
        assert (await a_failure(pair.down)).code == "ProtocolError"


async def test_a_chunk_over_the_limit_is_refused_before_it_is_copied(site: Site) -> None:
    async with a_pair(site, "same pod", up=ClientLimits(max_chunk_bytes=1000)) as pair:
        with pytest.raises(CapacityExceeded, match="1001 bytes"):
            await pair.up.put("r", EDGE, rows(some_bytes(1001)))


@MODES
async def test_many_requests_at_once(site: Site, mode: str) -> None:
    """R26, R39: 60 concurrent streams of 12 chunks, each byte-exact and in order."""
    async with a_pair(site, mode) as pair:
        names = [f"request-{n}" for n in range(60)]
        for name in names:
            await pair.down.open(name, producer(pair.up))
        got: dict[str, list[int]] = {name: [] for name in names}

        async def feed(index: int) -> None:
            for n in range(12):
                data = some_bytes(3000 if n % 4 else 60_000, index * 100 + n)
                await pair.up.put(names[index], EDGE, rows(data, start=n, finished=n == 11))

        async with asyncio.TaskGroup() as group:
            for index in range(len(names)):
                group.create_task(feed(index))
            for event in range(60 * 12):
                chunk = await a_chunk(pair.down)
                expected = some_bytes(3000 if chunk.seq % 4 else 60_000, names.index(chunk.request) * 100 + chunk.seq)
                assert np.array_equal(chunk.payload.tensors["rows"], expected), event
                got[chunk.request].append(chunk.seq)
        assert all(seqs == list(range(12)) for seqs in got.values())
        del chunk
        await pair.nothing_left()
