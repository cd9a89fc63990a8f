"""The line from engine to engine: small chunks that no sidecar sees. In order with the others, or a reason."""

from __future__ import annotations

import asyncio
import os

import pytest

from omni_runtime.connectors import wire
from omni_runtime.connectors.api import ChunkReceived
from omni_runtime.connectors.client import ClientLimits, SidecarEdgeClient
from omni_runtime.connectors.engine_session import EngineSession
from omni_runtime.connectors.ipc import claim
from omni_runtime.connectors.line import Lines, Room
from omni_runtime.connectors.sender import Sender
from omni_runtime.connectors.streams import Key
from omni_runtime.connectors.wire import INLINE_BYTES, WINDOW_PIECES
from omni_runtime.errors import DeadlineExceeded, StreamClosed
from tests.unit.connectors.kit import (
    EDGE,
    Pair,
    Site,
    a_chunk,
    a_failure,
    a_pair,
    rows,
    some_bytes,
    take,
    until,
    until_failure,
    whole_stream,
)
from tests.unit.connectors.line_kit import (
    LARGE,
    SMALL,
    a_paired_stream,
    a_reader_that_pauses,
    a_stuck_sidecar,
    exact,
    lines,
    put_small,
)


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
    return any(map(lines(client).leads_to, lines(client)._out))


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
        forger, _ = await claim(pair.hosts[0].options.ipc_dir / "sidecar.sock", session, 5)
        for room in (
            Room(token ^ 1, stream.number, 1),
            Room(token, stream.number + 1, 1),
            Room(token, stream.number, WINDOW_PIECES + 1),
        ):
            os.write(forger, wire.encode([room]))
        lines(pair.up).drain()
        assert stream.credits == free
        os.write(forger, wire.encode([Room(token, stream.number, 1)]))
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


async def test_chunks_of_one_turn_go_together(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first, which waits for nothing, and for what is too large to gain by it."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        sent: list[int] = []
        write = Lines._write
        monkeypatch.setattr(Lines, "_write", lambda *a: sent.append(len(a[2])) or write(*a))
        await put_small(pair, 1)
        lines(pair.down).drain()
        assert pair.down._receiver.queued_events == 1, "within the turn"
        await put_small(pair, *range(2, 21))
        await pair.up.put("r", EDGE, rows(some_bytes(INLINE_BYTES, 21), start=21))
        assert exact([await a_chunk(pair.down) for _ in range(20)]) == list(range(1, 21))
        assert exact([await a_chunk(pair.down)], INLINE_BYTES) == [21]
        together = [length // SMALL for length in sent if length > SMALL]
        assert together == [1, 16, 3, INLINE_BYTES // SMALL]
        sent.clear()
        await put_small(pair, 22, 23, 24)
        assert exact([await a_chunk(pair.down) for _ in range(3)]) == [22, 23, 24]
        assert [length // SMALL for length in sent if length > SMALL] == [3], "turns bring several"
        await put_small(pair, 25)
        assert exact([await a_chunk(pair.down)]) == [25]
        await put_small(pair, 26)
        lines(pair.down).drain()
        assert pair.down._receiver.queued_events == 1, "one alone waits for nothing again"
        await put_small(pair, 27, 28, finished=True)
        assert exact(await whole_stream(pair.down)) == [26, 27, 28]
        await pair.nothing_left()


@pytest.mark.parametrize("alone", [0, 1, 2])
async def test_what_a_line_does_not_take_at_the_end_of_a_turn_takes_the_usual_way(
    site: Site, monkeypatch: pytest.MonkeyPatch, alone: int
) -> None:
    """R18, R23: after the put has returned. In order, counted once by the sidecar, and the stream goes on."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        write = Lines._write
        left = iter([True, False, *[True] * alone, False])  # the first of the turn, the others together, and one by one
        with monkeypatch.context() as patch:
            patch.setattr(Lines, "_write", lambda *a: next(left, True) and write(*a))
            await put_small(pair, 1, 2, 3, 4)
            assert exact([await a_chunk(pair.down) for _ in range(4)]) == [1, 2, 3, 4]
        await put_small(pair, 5, 6, finished=True)
        assert exact(await whole_stream(pair.down)) == [5, 6]
        await until(lambda: b'to_stage="talker"} 7.0' in pair.hosts[0].sidecar.metrics.render())
        await pair.nothing_left()


async def test_an_abort_comes_after_what_was_put_in_the_same_turn(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the line takes nothing any more."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        write = Lines._write
        left = iter([True])
        monkeypatch.setattr(Lines, "_write", lambda *a: next(left, False) and write(*a))
        await put_small(pair, 1, 2, 3)
        await pair.up.abort("r")
        events = [e async for e in until_failure(pair.down)]
        assert exact(events[:-1]) == [1, 2, 3]
        assert events[-1].code == "UpstreamLost"
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
        events = [e async for e in until_failure(pair.down)]
        assert exact(events[:-1]) == list(range(WINDOW_PIECES + 1, 2 * WINDOW_PIECES + 1))
        assert events[-1].code == "UpstreamLost"
        await pair.nothing_left()


async def test_nothing_is_told_of_a_stream_after_its_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """R6: its last chunk may still wait in the sidecar, and a word of credits would break the rules there. The stream had none
    left, and has got some for its last chunk.
    """
    said: list[str] = []
    hear = EngineSession.on_frame
    monkeypatch.setattr(EngineSession, "on_frame", lambda *a: said.append(name_of(a[1])) or hear(*a))
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        stream = pair.up._sender._streams["r", EDGE]
        await put_small(pair, *range(1, WINDOW_PIECES + 1))
        pair.up._sender.report()
        assert stream.starved
        ending = asyncio.create_task(put_small(pair, WINDOW_PIECES + 1, finished=True))
        got = [await a_chunk(pair.down) for _ in range(WINDOW_PIECES)]
        await ending
        assert pair.up._sender._unreported
        await pair.up.health()
        said.clear()
        pair.up._sender.report()
        await pair.up.health()
        assert said == ["Ping"]
        got += await whole_stream(pair.down)
        assert exact(got) == list(range(1, WINDOW_PIECES + 2))


async def test_no_put_overtakes_one_that_waits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """R18: though there is room again by the time it is called."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        stream = pair.up._sender._streams["r", EDGE]
        given: list[tuple[int, int, int, int]] = []
        monkeypatch.setattr(Lines, "give_room", lambda _, *room: given.append(room) is None)
        await put_small(pair, *range(1, WINDOW_PIECES + 1))
        waiting = asyncio.create_task(put_small(pair, WINDOW_PIECES + 1))
        got = [await a_chunk(pair.down) for _ in range(8)]
        await until(lambda: bool(given) and stream.lock.locked())
        ((_, token, number, pieces),) = given
        pair.up._sender.on_room(Room(token, number, pieces))
        await put_small(pair, WINDOW_PIECES + 2)
        await waiting
        got += [await a_chunk(pair.down) for _ in range(WINDOW_PIECES - 6)]
        assert exact(got) == list(range(1, WINDOW_PIECES + 3))
