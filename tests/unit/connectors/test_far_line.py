"""The line between engines of two pods: past both sidecars, in order with what they bring, or a reason."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from omni_runtime.connectors import secure, wire
from omni_runtime.connectors.client import ClientLimits
from omni_runtime.connectors.far_lines import LINGER_SECONDS, FarLines, _hear, _introduce, _say
from omni_runtime.connectors.handshake import LINE, Secrets
from omni_runtime.connectors.ipc import claim
from omni_runtime.connectors.line import Lines
from omni_runtime.connectors.outbound import PeerSession
from omni_runtime.connectors.payloads import describe
from omni_runtime.connectors.sealed_line import SealedLine
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.connectors.wire import INLINE_BYTES, WINDOW_PIECES
from omni_runtime.errors import DeadlineExceeded, OmniError, StreamClosed
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


async def a_far_stream(pair: Pair, request: str = "r") -> None:
    """Its first chunk has been taken, and one on the line."""
    await a_paired_stream(pair, request)
    await until(lambda: bool(far_lines(pair.down)))
    await put_small(pair, 1, request=request)
    assert exact([await a_chunk(pair.down)]) == [1]


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


@asynccontextmanager
async def both_engines(site: Site) -> AsyncIterator[tuple[Pair, Callable[[str], object]]]:
    """And a function that ends one of them, or the link between their sidecars."""
    async with site.sidecar("pod-a") as a, site.sidecar("pod-b") as b:
        async with a.engine("thinker-0") as up, b.engine("talker-0") as down:
            pair = Pair(up, down, (a, b))

            async def end(which: str) -> None:
                if which == "link":
                    for peer in list(a.sidecar.listener._peers):
                        peer.channel.close("cut")
                else:
                    await (up if which == "producer" else down).close()

            yield pair, end


@pytest.mark.parametrize("which", ["producer", "consumer", "link"])
async def test_a_line_ends_with_either_engine_and_with_the_link(site: Site, which: str) -> None:
    async with both_engines(site) as (pair, end):
        await a_far_stream(pair)
        await end(which)  # type: ignore[misc]
        await until(lambda: not any(len(host.sidecar.far_lines) for host in pair.hosts))
        assert not any(host.sidecar.far_lines._named or host.sidecar.far_lines._dialled for host in pair.hosts)


async def test_lines_leave_no_descriptor(site: Site) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):
        async with a_pair(site, "two pods") as pair:
            await a_far_stream(pair)
            await pair.up.abort("r")
            assert (await a_failure(pair.down)).code == "UpstreamLost"
    await until(lambda: descriptors() <= before)


@asynccontextmanager
async def a_line_of_ours(site: Site, host: Host) -> AsyncIterator[tuple[socket.socket, Secrets]]:
    sock, secrets = await secure.dial("127.0.0.1", host.sidecar.data_port, site.keys, LINE)
    try:
        yield sock, secrets
    finally:
        sock.close()


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(wire.encode(wire.LineTo(999, 5)), id="an engine that is not here"),
        pytest.param(wire.encode(wire.Ping()), id="another message"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff" * 40, id="noise"),
        pytest.param(b"\x93\x0d\x01\x00", id="no name"),
        pytest.param(bytes(5000), id="too much"),
    ],
)
async def test_an_introduction_that_breaks_the_rules_makes_no_line(site: Site, said: bytes) -> None:
    """R58: nor harms anybody else."""
    async with a_pair(site, "two pods") as pair:
        await a_far_stream(pair)
        async with a_line_of_ours(site, pair.hosts[0]) as (sock, secrets):
            with contextlib.suppress(OSError):
                await _say(sock, secrets, said)
            with pytest.raises((OSError, TimeoutError)):
                await _hear(sock, secrets)
        assert len(pair.hosts[0].sidecar.far_lines) == 1
        await put_small(pair, 2, finished=True)
        assert exact(await whole_stream(pair.down)) == [2]


async def test_a_name_and_a_place_are_given_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_pair(site, "two pods") as pair:
        await a_far_stream(pair)
        there = pair.hosts[0].sidecar.far_lines
        ((session, end),) = there._ends.items()
        async with a_line_of_ours(site, pair.hosts[0]) as (sock, secrets):
            with pytest.raises((OSError, TimeoutError)):
                await _introduce(sock, secrets, wire.LineTo(end.engine, end.name))
        monkeypatch.setattr("omni_runtime.connectors.far_lines.MAX_LINES", 1)
        async with a_line_of_ours(site, pair.hosts[0]) as (sock, secrets):
            with pytest.raises((OSError, TimeoutError)):
                await _introduce(sock, secrets, wire.LineTo(end.engine, 7))
        with pytest.raises((OSError, ProtocolError)):
            await claim(pair.hosts[0].options.ipc_dir / "sidecar.sock", session, 5)


async def test_a_stream_takes_no_line_of_another_engine(site: Site) -> None:
    """R62: whatever the other sidecar says."""
    async with a_pair(site, "two pods") as pair, pair.hosts[0].engine("thinker-1") as other:
        await a_far_stream(pair)
        await pair.down.open("theirs", producer(other, "thinker-1"))
        await put_small(Pair(other, pair.down, pair.hosts), 0, request="theirs")
        assert exact([await a_chunk(pair.down)]) == [0]
        await until(lambda: has_line(other, "theirs"))
        hub = pair.hosts[0].sidecar.hub
        port, name = next(p for p in hub.table._ports if p.session in hub.consumers), 0
        said: list[object] = []
        for engine in hub.engines.values():
            engine.send = said.append  # type: ignore[method-assign]
        for name, end in hub.far_lines._named.items():
            hub.lay(port, name)
            assert bool(said) == (end.engine == hub.table.line(port)[0].session)  # type: ignore[index]
            said.clear()
        assert name
        hub.lay(port, 5)
        assert not said


@pytest.fixture
async def left(site: Site) -> AsyncIterator[tuple[FarLines, socket.socket]]:
    """Lines with one whose engine has gone and left more than the other end has taken, and that other end."""
    lost: set[int] = set()
    there = FarLines(site.keys, iter(range(9)).__next__, lambda session: session not in lost, lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        sock, _ = listener.accept()
    sock.setblocking(False)
    there._enter(7, 5, sock, Secrets(bytes(32), bytes(32)))
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(bytes(1 << 20))
    there.engine_lost(7)
    yield there, far
    far.close()
    await there.close()


async def test_a_sidecar_keeps_what_an_engine_has_left_on_a_line(left: tuple[FarLines, socket.socket]) -> None:
    there, far = left
    there.tick(time.monotonic())
    assert not there.idle
    assert there.named(5) is None
    read = asyncio.get_running_loop().run_in_executor(None, lambda: sum(iter(lambda: len(far.recv(1 << 20)), 0)))
    await until(lambda: there.tick(time.monotonic()) is None and there.idle)
    assert await read > 1 << 20
    assert not len(there)


async def test_but_not_for_ever(left: tuple[FarLines, socket.socket]) -> None:
    """R5: a reader that stands still holds up no end."""
    there, _ = left
    there.tick(time.monotonic() + LINGER_SECONDS + 1)
    assert there.idle


async def test_slow_introductions_cost_a_socket_for_a_few_seconds(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_runtime.connectors.secure.HANDSHAKE_SECONDS", 0.3)
    async with site.sidecar() as host:
        async with a_line_of_ours(site, host) as (sock, secrets):
            with pytest.raises((OSError, TimeoutError)):
                await _hear(sock, secrets)
        await until(lambda: len(host.sidecar.listener._tasks) == 1)
        assert not len(host.sidecar.far_lines)


async def test_streams_go_by_way_of_the_sidecars_where_no_line_can_be_made(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is not tried again for each."""
    tried: list[object] = []

    async def refuse(self: FarLines, *_: object) -> None:
        tried.append(None)
        raise ProtocolError("not today")

    monkeypatch.setattr(FarLines, "accept", refuse)
    async with a_pair(site, "two pods") as pair:
        for n in range(3):
            await pair.down.open(f"r{n}", producer(pair.up))
            await pair.up.put(f"r{n}", EDGE, rows(some_bytes(SMALL, 0)))
            assert exact([await a_chunk(pair.down)]) == [0]
            await until(
                lambda: bool(tried) and not any(d.task for d in pair.hosts[1].sidecar.far_lines._dialled.values())
            )
            await put_small(pair, 1, 2, finished=True, request=f"r{n}")
            assert exact(await whole_stream(pair.down)) == [1, 2]
        assert len(tried) == 1
        await pair.nothing_left()


async def test_nobody_reaches_a_stream_without_its_token(site: Site) -> None:
    """R62: another engine of the pipeline, with a line of its own."""
    async with a_pair(site, "two pods") as pair, pair.hosts[0].engine("thinker-1") as other:
        await a_far_stream(pair)
        await pair.down.open("theirs", producer(other, "thinker-1"))
        await put_small(Pair(other, pair.down, pair.hosts), 0, request="theirs")
        assert exact([await a_chunk(pair.down)]) == [0]
        await until(lambda: has_line(other, "theirs"))
        stream = other._sender._streams["theirs", EDGE]
        ours = pair.up._sender._streams["r", EDGE]
        assert stream.line is not None and ours.line is not None
        header = describe(rows(some_bytes(SMALL, 9), start=2))
        for token in (ours.line[1] ^ 1, 0, 1):
            assert lines(other).send(stream.line[0], token, 1, 2, header, bytes(SMALL))
        lines(other).flush()
        await put_small(pair, 2, 3, finished=True)
        assert exact(await whole_stream(pair.down)) == [2, 3]


async def test_a_consumer_that_is_gone_is_told(site: Site) -> None:
    async with site.sidecar("pod-a") as a, site.sidecar("pod-b") as b, a.engine("thinker-0") as up:
        async with b.engine("talker-0") as down:
            await a_far_stream(Pair(up, down, (a, b)))
        with pytest.raises(OmniError, match="gone"):
            await put_small(Pair(up, up, (a, b)), *range(2, 10 * WINDOW_PIECES))
        async with b.engine("talker-1") as down:
            pair = Pair(up, down, (a, b))
            await a_far_stream(pair, "s")
            await put_small(pair, *range(2, 10), finished=True, request="s")
            assert exact(await whole_stream(down)) == list(range(2, 10))
            await pair.nothing_left()


async def test_a_sidecar_does_not_stop_before_its_lines_have_sent_everything(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site.sidecar() as host:
        assert host.sidecar.hub.idle
        monkeypatch.setattr(FarLines, "idle", property(lambda _: False))
        assert not host.sidecar.hub.idle
