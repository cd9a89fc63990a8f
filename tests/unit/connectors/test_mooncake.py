"""Edges of type Mooncake: large pieces are fetched by the transfer engine, everything else as between any two pods."""

from __future__ import annotations

import asyncio
import builtins
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_runtime.connectors import mooncake
from omni_runtime.connectors.api import ChunkReceived
from omni_runtime.connectors.client import ClientLimits
from omni_runtime.connectors.wire import Slab
from omni_runtime.errors import StreamClosed
from tests.unit.connectors.kit import (
    EDGE,
    MIB,
    Pair,
    Site,
    a_chunk,
    a_failure,
    a_pair,
    a_plan,
    producer,
    rows,
    some_bytes,
    until,
    whole_stream,
)

LARGE = 600_000
SMALL = 300_000  # fetched, but not worth sharing


@pytest.fixture
async def pair(site: Site) -> AsyncIterator[Pair]:
    async with a_pair(site, "mooncake") as pair:
        yield pair


def fallbacks(pair: Pair, reason: str) -> float:
    return sum(h.sidecar.metrics.fallbacks.labels(reason)._value.get() for h in pair.hosts)


async def feed(pair: Pair, request: str, sizes: tuple[int, ...]) -> None:
    for n, size in enumerate(sizes):
        await pair.up.put(request, EDGE, rows(some_bytes(size, n), start=n, finished=n == len(sizes) - 1))


async def exact(pair: Pair, request: str, sizes: tuple[int, ...]) -> None:
    await pair.down.open(request, producer(pair.up))
    async with asyncio.TaskGroup() as group:
        group.create_task(feed(pair, request, sizes))
        got = await whole_stream(pair.down)
    assert [c.seq for c in got] == list(range(len(sizes)))
    for chunk, size in zip(got, sizes, strict=True):
        assert np.array_equal(chunk.payload.tensors["rows"], some_bytes(size, chunk.seq)), chunk.seq
    del got, chunk


async def test_large_pieces_are_fetched_and_small_ones_keep_their_place(pair: Pair) -> None:
    await exact(pair, "r", (10, LARGE, 5, LARGE, 100_000, 3 * MIB, 0, LARGE))
    text = pair.hosts[0].sidecar.metrics.render().decode()
    assert 'omni:connector_chunks_total{connector="Mooncake"' in text
    assert fallbacks(pair, "fetch") == fallbacks(pair, "unavailable") == 0
    assert pair.hosts[1].sidecar.metrics.fetched._value.get() == 3 * LARGE + 3 * MIB
    await pair.nothing_left()


async def test_a_chunk_larger_than_the_arena(site: Site) -> None:
    async with a_pair(site, "mooncake", arena_bytes=8 * MIB, up=ClientLimits(arena_wait_s=0.05)) as pair:
        await exact(pair, "r", (40 * MIB, LARGE))
        await pair.nothing_left()


async def test_many_requests_at_once(pair: Pair) -> None:
    """R26, R39."""
    names = [f"request-{n}" for n in range(20)]
    for name in names:
        await pair.down.open(name, producer(pair.up))
    async with asyncio.TaskGroup() as group:
        for index, name in enumerate(names):
            group.create_task(feed(pair, name, (LARGE + index, 100, LARGE + index)))
        for _ in range(60):
            chunk = await a_chunk(pair.down)
            size = 100 if chunk.seq == 1 else LARGE + names.index(chunk.request)
            assert np.array_equal(chunk.payload.tensors["rows"], some_bytes(size, chunk.seq))
    del chunk
    await pair.nothing_left()


@pytest.mark.parametrize("who", ["consumer", "producer"])
async def test_abort_while_pieces_are_fetched(pair: Pair, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11, R12: the producer's bytes stay until the thread that reads them has ended, whoever gives up meanwhile."""
    gate = asyncio.Event()
    loop, fetch = asyncio.get_running_loop(), mooncake.Mooncake.fetch

    def held(self: mooncake.Mooncake, *place: Any) -> bool:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(30)
        return fetch(self, *place)

    monkeypatch.setattr(mooncake.Mooncake, "fetch", held)
    await pair.down.open("r", producer(pair.up))
    await pair.up.put("r", EDGE, rows(some_bytes(LARGE)))
    await until(lambda: pair.hosts[1].arena_used == LARGE)
    await (pair.down if who == "consumer" else pair.up).abort("r")
    if who == "consumer":
        with pytest.raises(StreamClosed):
            async with asyncio.timeout(30):
                while True:
                    await pair.up.put("r", EDGE, rows(some_bytes(9), start=1))
    else:
        assert (await a_failure(pair.down)).code == "UpstreamLost"
    assert [h.arena_used for h in pair.hosts] == [LARGE, LARGE]
    gate.set()
    await pair.nothing_left()


async def test_a_fetch_that_fails_goes_over_tcp(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake.Mooncake, "fetch", lambda *_: False)
    await exact(pair, "r", (LARGE, 5, LARGE, LARGE))
    assert fallbacks(pair, "fetch") == 2, "told at both ends, once: the stream does not try again"
    await pair.nothing_left()


async def test_an_engine_that_cannot_start_is_told_and_the_edge_goes_over_tcp(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("mooncake"):
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    async with a_pair(site, "mooncake") as pair:
        await exact(pair, "r", (LARGE, 5, LARGE))
        assert fallbacks(pair, "unavailable") >= 2
        text = pair.hosts[0].sidecar.metrics.render().decode()
        assert "omni:connector_mooncake_up 0.0" in text
        assert 'omni:connector_chunks_total{connector="TCP"' in text
        await pair.nothing_left()


async def test_a_dead_producer_pod_in_mid_fetch_is_told(site: Site) -> None:
    async with site.sidecar("pod-b", plan=(plan := a_plan(connector="Mooncake"))) as near:
        async with site.sidecar("pod-a", plan=plan) as far, far.engine("thinker-0") as up:
            async with near.engine("talker-0") as down:
                await down.open("r", producer(up))
                await up.put("r", EDGE, rows(some_bytes(LARGE)))
                await far.sidecar.close()
                while True:
                    event = await asyncio.wait_for(anext(down.events()), 20)
                    if not isinstance(event, ChunkReceived):
                        break
                assert event.code == "UpstreamLost"
                del event
        await until(lambda: near.arena_used == 0 and len(near.sidecar.links) == 0)


TOPOLOGY = '{"cpu:0": [["mlx5_0"], ["mlx5_1"]], "cuda:0": [["mlx5_1"], []]}'


@pytest.mark.parametrize(
    ("topology", "found"),
    [
        (TOPOLOGY, {"mlx5_0", "mlx5_1"}),
        ('{"cpu:0": [[], []]}', set()),
        ("{}", set()),
        ("", set()),
        ("[1]", set()),
    ],
)
def test_devices_that_the_engine_sees(topology: str, found: set[str]) -> None:
    assert mooncake.rdma_devices(topology) == found


@pytest.mark.parametrize(
    ("found", "wanted", "says"),
    [
        (set(), "", "no RDMA device is visible"),
        (set(), "mlx5_0", "no RDMA device is visible"),
        ({"mlx5_1", "mlx5_0"}, "mlx5_0, mlx5_7", "no RDMA device mlx5_7 here; there are mlx5_0, mlx5_1"),
    ],
)
def test_rdma_that_is_not_there_is_no_rdma(found: set[str], wanted: str, says: str) -> None:
    """The engine would take TCP and say nothing."""
    with pytest.raises(mooncake.MooncakeUnavailable, match=says):
        mooncake._require_rdma(frozenset(found), wanted)
    mooncake._require_rdma(frozenset({"mlx5_0", "mlx5_1"}), "mlx5_1")
    mooncake._require_rdma(frozenset({"mlx5_0"}), "")


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="there are RDMA devices")
async def test_where_rdma_is_missing_edges_go_over_tcp_and_it_is_told(site: Site) -> None:
    """By mooncake_up 0, of which the pipeline's status speaks; the tensors come all the same."""
    options = mooncake.MooncakeOptions("rdma", "mlx5_0")
    async with a_pair(site, "mooncake", mooncake=options) as pair:
        await exact(pair, "r", (LARGE, 5, LARGE))
        assert fallbacks(pair, "unavailable") >= 2
        assert all("omni:connector_mooncake_up 0.0" in h.sidecar.metrics.render().decode() for h in pair.hosts)
        await pair.nothing_left()


@given(st.integers(1, 5 << 30), st.integers(1, 8))
def test_parts_are_the_piece(length: int, most: int) -> None:
    found = mooncake.parts(length, most)
    assert [at for at, _ in found] == [0, *itertools.accumulate(part for _, part in found)][:-1]
    assert sum(part for _, part in found) == length
    assert len(found) == 1 or (len(found) <= most and min(part for _, part in found) >= mooncake.PART_BYTES)


class CountingEngine:
    """The real one, and the lengths that it was asked to read."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.read: list[int] = []

    def batch_transfer_async_read(self, segment: str, here: list[int], there: list[int], lengths: list[int]) -> int:
        self.read += lengths
        transfer: int = self.engine.batch_transfer_async_read(segment, here, there, lengths)
        return transfer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


async def test_engines_share_a_large_piece_and_take_turns_at_small_ones(pair: Pair) -> None:
    """One engine's thread for sockets is a core's worth of 1.4 GB/s."""
    reader = pair.hosts[1].sidecar.hub.mooncake
    assert reader is not None and len(reader.segments) == mooncake.TCP_ENGINES == 2
    reader._engines = engines = tuple(CountingEngine(engine) for engine in reader._engines)
    await exact(pair, "r", (SMALL, SMALL, SMALL, SMALL))
    assert [e.read for e in engines] == [[SMALL, SMALL]] * 2
    await exact(pair, "s", (5 * MIB + 1,))
    assert sum(sum(e.read[2:]) for e in engines) == 5 * MIB + 1
    assert all(max(e.read[2:]) == 2 * MIB - 64 for e in engines), "halves of a piece of 4 MiB"
    await pair.nothing_left()


async def test_a_fetch_is_over_when_all_of_its_parts_are(pair: Pair) -> None:
    """R11: also where one part has failed already; the others still write to the slab, which is somebody else's next."""
    reader = pair.hosts[1].sidecar.hub.mooncake
    assert reader is not None
    told: list[str] = []

    class Engine:
        def __init__(self, status: int, looks: int) -> None:
            self.status, self.looks = status, looks

        def batch_transfer_async_read(self, *_: Any) -> int:
            return 7

        def transfer_check_status(self, _: int) -> int:
            self.looks -= 1
            if self.looks <= 0:
                told.append("ended")
            return self.status if self.looks <= 0 else 0

        def __getattr__(self, name: str) -> Any:
            return getattr(real[0], name)

    real = reader._engines
    for statuses in ((-1, 1), (1, -1), (-1, -1)):
        told.clear()
        reader._engines = tuple(Engine(status, looks) for status, looks in zip(statuses, (1, 20), strict=True))
        assert not reader.fetch(reader.segments, reader.address, Slab(0, 4 * MIB, 1))
        assert told == ["ended", "ended"]
    reader._engines = real
    await pair.nothing_left()


@pytest.mark.parametrize("segments", [("10.0.0.1",), ("127.0.0.1:1", "../x:1")])
async def test_a_place_that_is_none_is_not_read(pair: Pair, segments: tuple[str, ...]) -> None:
    reader = pair.hosts[1].sidecar.hub.mooncake
    assert reader is not None and not reader.fetch(segments, reader.address, Slab(0, MIB, 1))
