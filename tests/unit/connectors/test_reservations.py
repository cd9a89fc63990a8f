"""Tensors that an engine computes where they are sent from."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from omni_runtime.connectors import payloads
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.protocol.payload import Payload
from tests.unit.connectors.kit import EDGE, MODES, Site, a_chunk, a_pair, producer, some_bytes, until


@MODES
async def test_output_that_is_computed_in_the_arena_is_not_copied(
    site: Site, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_copy(*_: object) -> None:
        raise AssertionError("the bytes were copied")

    monkeypatch.setattr(payloads, "write", no_copy)
    monkeypatch.setattr(payloads, "flat", no_copy)
    async with a_pair(site, mode) as pair:
        await pair.down.open("r", producer(pair.up))
        for n, size in enumerate((40, 300_000)):
            room = await pair.up.reserve({"hidden": ((size, 2), "bfloat16"), "codes": ((3,), "int32")})
            assert room is not None
            room.tensors["hidden"][:] = some_bytes(size * 4, n).view(np.uint16).reshape(size, 2)
            room.tensors["codes"][:] = (1, 2, n)
            payload = Payload(n, 1, n == 1, room.tensors, {}, {"hidden": "bfloat16"})
            await pair.up.put("r", EDGE, payload, room)
            with pytest.raises(ValueError, match="read-only"):
                room.tensors["codes"][0] = 9
            back = (await a_chunk(pair.down)).payload
            assert np.array_equal(back.tensors["hidden"], room.tensors["hidden"])
            assert back.tensors["codes"].tolist() == [1, 2, n]
            assert back.dtypes == {"hidden": "bfloat16"}
            assert pair.hosts[0].sidecar.metrics.spilled._value.get() == 0
            del room, payload, back
        await pair.nothing_left()


async def test_a_reservation_that_is_dropped_goes_back(site: Site) -> None:
    """R11: an engine that fails between computing and put leaks nothing; a stale reservation is copied, not reused."""
    async with a_pair(site, "same pod") as pair:
        room = await pair.up.reserve({"x": ((300_000,), "uint8")})
        assert room is not None
        used = (await pair.up.health()).arena_used_bytes
        assert used >= 300_000
        del room
        gc.collect()
        await until(lambda: pair.up._attachment.pool.used_bytes == 0)
        again = await pair.up.reserve({"x": ((300_000,), "uint8")})
        assert again is not None
        again.tensors["x"][:] = 5
        await pair.down.open("r", producer(pair.up))
        for last in (False, True):  # the second time its slab belongs to the first chunk already
            await pair.up.put("r", EDGE, Payload(0, 1, last, again.tensors), again)
        first, second = await a_chunk(pair.down), await a_chunk(pair.down)
        assert first.payload.tensors["x"].tobytes() == second.payload.tensors["x"].tobytes() == b"\x05" * 300_000
        del again, first, second
        await pair.nothing_left()


@pytest.mark.parametrize("shape", [((0,), "uint8"), ((1 << 40,), "float32")], ids=["nothing", "larger than any slab"])
async def test_what_cannot_be_reserved_is_put_as_usual(site: Site, shape: tuple[tuple[int, ...], str]) -> None:
    async with a_pair(site, "same pod") as pair:
        assert await pair.up.reserve({"x": shape}) is None
        with pytest.raises(ProtocolError, match="object"):
            await pair.up.reserve({"x": ((1,), "object")})
