"""Small chunks for a long time, between real processes: how long does a stream ever stand still?"""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from omni_runtime.connectors.api import ChunkReceived
from omni_runtime.connectors.client import SidecarEdgeClient
from tests.unit.connectors.kit import EDGE, Site, producer, rows, some_bytes
from tests.unit.connectors.pods import two_pods

STREAMS = 8
EVERY_SECONDS = 0.04  # a chunk of a codec stream
LARGE = 3_000_000  # now and then a payload that small chunks must not wait for


async def soak(site: Site, seconds: float) -> list[float]:
    """Gaps between chunks of each stream beyond the gap at their source, in seconds."""
    async with two_pods(site, "two pods") as (first, second):
        async with first.engine("thinker-0") as up, second.engine("talker-0") as down:
            until = time.monotonic() + seconds

            async def feed(request: str, size: int) -> None:
                await down.open(request, producer(up))
                for seq in itertools.count():
                    last = time.monotonic() > until
                    payload = rows(some_bytes(size, seq), start=seq, finished=last, at=time.monotonic())
                    await up.put(request, EDGE, payload)
                    if last:
                        return
                    await asyncio.sleep(EVERY_SECONDS if size < LARGE else 1.0)

            async with asyncio.TaskGroup() as group:
                for n in range(STREAMS):
                    group.create_task(feed(f"small-{n}", 2_000))
                group.create_task(feed("large", LARGE))
                delays = await _delays(down, STREAMS + 1)
        await first.nothing_left()
        await second.nothing_left()
    return delays


async def _delays(down: SidecarEdgeClient, streams: int) -> list[float]:
    """Seconds from put to here, of every small chunk; all streams have to end well."""
    delays: list[float] = []
    expected: dict[str, int] = {}
    async for event in down.events():
        assert isinstance(event, ChunkReceived), event
        assert event.seq == expected.get(event.request, 0)
        expected[event.request] = event.seq + 1
        at = event.payload.meta["at"]
        assert isinstance(at, float)
        if event.request != "large":
            delays.append(time.monotonic() - at)
        if event.payload.finished:
            streams -= 1
            if not streams:
                return delays
    raise AssertionError("events ended")


async def test_no_stream_stands_still_for_seconds(site: Site) -> None:
    delays = await soak(site, 4)
    assert len(delays) > STREAMS * 10
    assert max(delays) < 10


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_no_stream_stands_still_for_minutes_of_streaming(site: Site) -> None:
    """A lost wake-up or a credit that is not returned would hold a stream until the next event, or for ever."""
    delays = sorted(await soak(site, 240))
    print(
        f"{len(delays)} chunks, p50 {delays[len(delays) // 2]:.4f} s, p99 {delays[-len(delays) // 100]:.4f} s,"
        f" max {delays[-1]:.4f} s"
    )
    assert delays[-1] < 10
