"""The line between engines of two pods: past both sidecars, in order with what they bring, or a reason."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from omni_runtime.connectors.client import ClientLimits
from omni_runtime.connectors.line import Lines
from omni_runtime.connectors.outbound import PeerSession
from omni_runtime.connectors.sealed_line import SealedLine
from omni_runtime.connectors.wire import INLINE_BYTES, WINDOW_PIECES
from omni_runtime.errors import DeadlineExceeded, StreamClosed
from tests.unit.connectors.kit import (
    EDGE,
    FULL,
    Host,
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
    a_far_stream,
    a_line_that_lags,
    a_paired_stream,
    a_reader_that_pauses,
    exact,
    far_lines,
    lines,
    put_small,
)
from tests.unit.connectors.pods import two_pods

BETWEEN_PODS = pytest.mark.parametrize("mode", ["two pods", "mooncake"])


def metric(host: Host, text: str) -> bool:
    return text in host.sidecar.metrics.render().decode()


LABELS = 'from_replica="thinker-0",from_stage="thinker",model_name="x",to_replica="talker-0",to_stage="talker"'


@BETWEEN_PODS
async def test_small_chunks_go_past_both_sidecars(site: Site, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R19, R23: once and in order; both sidecars count them all the same."""
    carried: list[int] = []
    deliver = PeerSession.deliver
    monkeypatch.setattr(PeerSession, "deliver", lambda *a: carried.append(a[1].piece.put.seq) or deliver(*a))
    async with a_pair(site, mode) as pair:
        await a_far_stream(pair)
        carried.clear()
        for n in range(2, 3 * WINDOW_PIECES):
            await put_small(pair, n)
            assert exact([await a_chunk(pair.down)]) == [n]
        assert not carried
        last = 3 * WINDOW_PIECES
        await put_small(pair, last, finished=True)
        assert (await a_chunk(pair.down)).payload.finished
        assert carried == [last]
        connector = "TCP" if mode == "two pods" else "Mooncake"
        chunks = f'omni:connector_chunks_total{{connector="{connector}",{LABELS}}} {last + 1}.0'
        await until(lambda: metric(pair.hosts[0], chunks))
        assert metric(pair.hosts[0], f"vllm_omni:transfer_tx_s_count{{{LABELS}}} {last + 1}.0")
        arrived = f"vllm_omni:transfer_in_flight_s_count{{{LABELS}}} {last + 1}.0"
        await until(lambda: metric(pair.hosts[1], arrived))
        assert metric(pair.hosts[1], f"vllm_omni:transfer_rx_s_count{{{LABELS}}} {last + 1}.0")
        await pair.nothing_left()


async def test_one_line_for_all_streams_of_two_engines(site: Site) -> None:
    async with a_pair(site, "two pods") as pair:
        for n in range(5):
            await a_far_stream(pair, f"r{n}")
        assert [len(far_lines(client)) for client in (pair.up, pair.down)] == [1, 1]
        assert [len(host.sidecar.far_lines) for host in pair.hosts] == [1, 1]


async def test_full_payload_edges_over_the_line(site: Site) -> None:
    """R1: more chunks than any window."""
    async with a_pair(site, "two pods") as pair:
        await pair.down.open("r", producer(pair.up, edge=FULL))
        await pair.up.put("r", FULL, rows(some_bytes(SMALL, 0)))
        await until(lambda: has_line(pair.up, "r", FULL))
        count = 4 * WINDOW_PIECES
        for n in range(1, count):
            await pair.up.put("r", FULL, rows(some_bytes(SMALL, n), start=n, finished=n == count - 1))
        assert exact(await whole_stream(pair.down)) == list(range(count))
        await pair.nothing_left()


@BETWEEN_PODS
async def test_what_the_sidecars_bring_waits_for_what_is_on_the_line(site: Site, mode: str) -> None:
    """R18: two ways, and the later chunk is here first; the end of the stream, too."""
    async with a_pair(site, mode) as pair:
        await a_far_stream(pair)
        (stream,) = pair.down._receiver._ports.values()
        with a_line_that_lags(pair.down):
            await put_small(pair, 2, 3)
            await pair.up.put("r", EDGE, rows(some_bytes(LARGE, 4), start=4))
            await pair.up.put("r", EDGE, rows(some_bytes(2 * LARGE, 5), start=5))
            await until(lambda: len(stream.held) == 2)
            await put_small(pair, 6, 7, finished=True)
            await until(lambda: len(stream.held) == 3)
            assert not pair.down._receiver.queued_events
        got = await whole_stream(pair.down)
        assert [c.seq for c in got] == list(range(2, 8))
        assert exact([got[2]], LARGE) == [4]
        assert exact([got[3]], 2 * LARGE) == [5]
        assert exact([*got[:2], *got[4:]]) == [2, 3, 6, 7]
        del got
        await pair.nothing_left()


async def test_what_was_taken_is_told_by_the_sidecars_where_the_line_takes_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lines, "give_room", lambda *_: False)
    async with a_pair(site, "two pods") as pair:
        await a_paired_stream(pair)
        for n in range(1, 4 * WINDOW_PIECES):
            await put_small(pair, n, finished=n == 4 * WINDOW_PIECES - 1)
            assert exact([await a_chunk(pair.down)]) == [n]
        await pair.nothing_left()


async def test_what_does_not_come_off_the_line_is_told(site: Site) -> None:
    """R5, R18: within its deadline, and nothing that waited for it stays in the arena."""
    async with a_pair(site, "two pods", down=ClientLimits(line_wait_s=0.3)) as pair:
        await a_far_stream(pair)
        with a_line_that_lags(pair.down):
            await put_small(pair, 2)
            await pair.up.put("r", EDGE, rows(some_bytes(LARGE, 3), start=3))
            failed = await a_failure(pair.down)
            assert failed.code == "UpstreamLost"
            assert "chunk 2 was on the line" in failed.message
            with pytest.raises(StreamClosed):
                await until(lambda: pair.up._sender._streams["r", EDGE].error is not None)
                await put_small(pair, 4)
        await pair.nothing_left()


async def test_a_chunk_that_both_ways_have_passed_is_missing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """R18: at once, though the line works."""
    async with a_pair(site, "two pods") as pair:
        await a_far_stream(pair)
        with monkeypatch.context() as patch:
            patch.setattr(SealedLine, "send", lambda *_: True)
            await put_small(pair, 2)
            lines(pair.up).flush()
        await put_small(pair, 3)
        await pair.up.put("r", EDGE, rows(some_bytes(LARGE, 4), start=4))
        failed = await a_failure(pair.down, 10)
        assert (failed.code, "chunk 2" in failed.message) == ("UpstreamLost", True)
        await pair.nothing_left()


def cut(pair: Pair) -> None:
    """As when the network between the pods gives the connection up."""
    (far,) = far_lines(pair.up)
    far._sock.shutdown(socket.SHUT_RDWR)


def forged(pair: Pair) -> None:
    (far,) = far_lines(pair.up)
    far._sock.send(bytes([40, 0, 0, 0]) + bytes(40))


def too_long(pair: Pair) -> None:
    (far,) = far_lines(pair.up)
    far._sock.send(b"\xff" * 8)


@pytest.mark.parametrize("end", [cut, forged, too_long])
async def test_a_line_that_breaks_ends_the_streams_on_it(site: Site, end: Callable[[Pair], None]) -> None:
    """R11, R18: those of which something was on the line; both ends are told at once, and the next has a new line."""
    async with a_pair(site, "two pods") as pair:
        await a_far_stream(pair)
        await pair.down.open("other", producer(pair.up))
        await pair.up.put("other", EDGE, rows(some_bytes(LARGE, 0)))
        assert exact([await a_chunk(pair.down)], LARGE) == [0]
        await until(lambda: has_line(pair.up, "other"))
        end(pair)
        assert (await a_failure(pair.down)).code == "UpstreamLost"
        with pytest.raises(StreamClosed, match="line to its consumer is gone"):
            await put_small(pair, *range(2, 10))
        await until(lambda: not far_lines(pair.up) and not far_lines(pair.down))
        await pair.up.put("other", EDGE, rows(some_bytes(SMALL, 1), start=1))
        await pair.up.put("other", EDGE, rows(some_bytes(SMALL, 2), start=2, finished=True))
        assert exact(await whole_stream(pair.down)) == [1, 2], "it goes on by way of the sidecars"
        await until(lambda: not any(len(host.sidecar.far_lines) for host in pair.hosts))
        await a_far_stream(pair, "next")
        await put_small(pair, 2, finished=True, request="next")
        await a_chunk(pair.down)
        await pair.nothing_left()


async def test_a_finished_stream_is_delivered_though_its_producer_has_left(site: Site) -> None:
    """And its sidecar drained: what is on the line is the kernel's, and the sidecar holds the connection."""
    async with site.sidecar("pod-a") as host, site.sidecar("pod-b") as there, there.engine("talker-0") as down:
        async with host.engine("thinker-0") as up:
            pair = Pair(up, down, (host, there))
            await a_far_stream(pair)
            with a_line_that_lags(down):
                await put_small(pair, *range(2, 12), finished=True)
                await up.close()
                await until(lambda: not host.sidecar.hub.engines)
                assert await asyncio.wait_for(host.sidecar.drain(), 20)
                await host.sidecar.close()
        assert exact(await whole_stream(down)) == list(range(2, 12))


async def test_a_finished_stream_is_delivered_though_its_producer_is_killed(site: Site) -> None:
    """R11: with everything still on the line."""
    async with two_pods(site, "two pods") as (first, second), second.engine("talker-0") as down:
        engine = await first.engine_process("ending", "r", 12)
        assert engine.producer is not None and engine.process.stdin is not None and engine.process.stdout is not None
        await down.open("r", engine.producer)
        assert (await a_chunk(down)).seq == 0
        await until(lambda: bool(far_lines(down)))
        with a_line_that_lags(down):
            engine.process.stdin.write(b"go\n")
            assert await asyncio.wait_for(engine.process.stdout.readline(), 30) == b"ended\n"
            engine.process.kill()
            await engine.process.wait()
            await first.until_gauge("omni:connector_engines", 0)
        assert exact(await whole_stream(down), 2_000) == list(range(1, 12))
        for pod in (first, second):
            await pod.nothing_left()


class Full:
    """A socket whose kernel buffers take `room` bytes more, as when the other pod reads nothing."""

    def __init__(self, sock: socket.socket, room: int) -> None:
        self._sock = sock
        self.room = room

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def send(self, data: bytes | memoryview) -> int:
        if not self.room:
            raise BlockingIOError
        count = self._sock.send(memoryview(data)[: self.room])
        self.room -= count
        return count


def filled(pair: Pair, room: int) -> tuple[SealedLine, Full]:
    """The producer's line."""
    (far,) = far_lines(pair.up)
    full = far._sock = Full(far._sock, room)  # type: ignore[assignment]
    return far, full


async def test_an_end_is_not_told_before_the_kernel_has_the_rest(site: Site) -> None:
    """A frame that the kernel has taken in part would be lost with its producer."""
    async with a_pair(site, "two pods") as pair:
        await a_far_stream(pair)
        far, full = filled(pair, 100)
        await put_small(pair, 2)
        assert far._behind
        full.room = 50  # again, and nothing may go between the parts of a frame
        await put_small(pair, 3)
        ending = asyncio.create_task(put_small(pair, 4, finished=True))
        await until(lambda: bool(far._written))
        assert not ending.done()
        full.room = 1 << 30
        await ending
        assert exact(await whole_stream(pair.down)) == [2, 3, 4]
        await pair.nothing_left()


async def test_a_line_that_takes_nothing_fails_the_put_that_ends_the_stream(site: Site) -> None:
    """R5: it says which edge and after how long; both ends are told, and nothing is left."""
    async with a_pair(site, "two pods", up=ClientLimits(put_deadline_s=0.5)) as pair:
        await a_far_stream(pair)
        filled(pair, 100)
        await put_small(pair, 2)
        with pytest.raises(DeadlineExceeded, match=f"{EDGE} of request r: .* took nothing off its line within 0.5 s"):
            await put_small(pair, 3, finished=True)
        assert (await a_failure(pair.down)).code == "UpstreamLost"
        await pair.nothing_left()


async def test_a_line_that_is_full_costs_its_speed_and_nothing_else(site: Site) -> None:
    """R26: chunks that it does not take go by way of the sidecars, and all come in order."""
    async with a_pair(site, "two pods") as pair:
        await a_far_stream(pair)
        far, full = filled(pair, 5000)
        for n in range(2, WINDOW_PIECES):
            await pair.up.put("r", EDGE, rows(some_bytes(INLINE_BYTES, n), start=n))
        assert far._behind
        (stream,) = pair.down._receiver._ports.values()
        await until(lambda: len(stream.held) == WINDOW_PIECES - 3)
        full.room = 1 << 30
        got = [await a_chunk(pair.down) for _ in range(2, WINDOW_PIECES)]
        assert exact(got, INLINE_BYTES) == list(range(2, WINDOW_PIECES))
        await put_small(pair, WINDOW_PIECES, WINDOW_PIECES + 1, finished=True)
        assert exact(await whole_stream(pair.down)) == [WINDOW_PIECES, WINDOW_PIECES + 1]
        await pair.nothing_left()


async def test_the_kernels_own_refusal_is_no_loss(site: Site) -> None:
    """R26: real buffers that are full, with a reader that pauses."""
    async with a_pair(site, "two pods") as pair:
        await a_far_stream(pair)
        (there,), (here,) = far_lines(pair.down), far_lines(pair.up)
        there._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        here._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with a_reader_that_pauses(pair.down):
            for n in range(2, WINDOW_PIECES):
                await pair.up.put("r", EDGE, rows(some_bytes(INLINE_BYTES, n), start=n))
        got = [await a_chunk(pair.down) for _ in range(2, WINDOW_PIECES)]
        assert exact(got, INLINE_BYTES) == list(range(2, WINDOW_PIECES))
        await put_small(pair, WINDOW_PIECES, finished=True)
        assert (await a_chunk(pair.down)).payload.finished
        await pair.nothing_left()


async def test_a_slow_consumer_holds_the_line_back(site: Site) -> None:
    """R26: at most a window is under way, and the put says after its deadline who does not take."""
    async with a_pair(site, "two pods", up=ClientLimits(put_deadline_s=1.5)) as pair:
        await a_far_stream(pair)
        with pytest.raises(DeadlineExceeded, match=rf"{EDGE} of request r.*1.5 s"):
            await put_small(pair, *range(2, 4 * WINDOW_PIECES))
        events = [e async for e in until_failure(pair.down)]
        assert exact(events[:-1]) == list(range(2, 1 + len(events)))
        assert len(events) - 1 <= WINDOW_PIECES
        await pair.nothing_left()
