"""The line between pods: how it is made, whom it lets in, and how it ends."""

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
from omni_runtime.connectors.far_lines import LINGER_SECONDS, FarLines, _hear, _introduce, _say
from omni_runtime.connectors.handshake import LINE, Secrets
from omni_runtime.connectors.ipc import claim
from omni_runtime.connectors.payloads import describe
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.connectors.wire import WINDOW_PIECES
from omni_runtime.errors import OmniError
from tests.unit.connectors.kit import (
    EDGE,
    Host,
    Pair,
    Site,
    a_chunk,
    a_failure,
    a_pair,
    producer,
    rows,
    some_bytes,
    until,
    whole_stream,
)
from tests.unit.connectors.line_kit import (
    SMALL,
    a_far_stream,
    another_far_stream,
    exact,
    lines,
    put_small,
)


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
        await another_far_stream(pair, other, "thinker-1", "theirs")
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
        await another_far_stream(pair, other, "thinker-1", "theirs")
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
