"""A producer that runs ahead reuses what its consumer gives back, and does not walk through the arena."""

from __future__ import annotations

import asyncio

import pytest

from omni_runtime.connectors import attachment
from omni_runtime.protocol.payload import Payload
from tests.unit.connectors.kit import EDGE, MIB, Site, a_chunk, a_pair, producer

COUNT = 60
SIZE = 600_000  # one in each extent of a sixteenth of the arena


async def test_a_stream_that_is_taken_at_once_stays_in_little_of_the_arena(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "_BEFORE_GROWING_SECONDS", 1.0)  # however slow the machine is
    async with a_pair(site, "same pod", arena_bytes=16 * MIB) as pair:
        leased: list[int] = []

        async def put() -> None:
            for n in range(COUNT):
                room = await pair.up.reserve({"x": ((SIZE,), "uint8")})
                assert room is not None
                await pair.up.put("r", EDGE, Payload(n, 1, n == COUNT - 1, room.tensors), room)
                del room
                leased.append(pair.hosts[0].sidecar.hub.leased_bytes)

        async def take() -> None:
            await pair.down.open("r", producer(pair.up))
            for _ in range(COUNT):
                await a_chunk(pair.down)

        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            group.create_task(put())
        assert max(leased) <= 8 * MIB, "in a window of 32 pieces without a wait it is all 16"
        await pair.nothing_left()
