"""Payloads that an engine leaves in pieces: joined in the arena, or anywhere if that is full; the same rows either way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from omni_runtime.connectors import payloads
from omni_runtime.connectors.client import ClientLimits
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.pump import Pump
from tests.unit.connectors.kit import EDGE, MIB, Pair, Site, a_chunk, a_pair, producer, some_bytes

ROWS, WIDTH = 300, 256


def in_pieces(start: int, rows: int, finished: bool) -> Payload:
    """token_ids whole; hidden: bfloat16 [rows, WIDTH] in three pieces."""
    hidden = some_bytes(2 * rows * WIDTH, start).view(np.uint16).reshape(rows, WIDTH)
    pieces = (hidden[:1], hidden[1 : rows // 2], hidden[rows // 2 :])
    ids = np.arange(start, start + rows)
    return Payload(start, rows, finished, {"token_ids": ids}, {"n": 1}, {"hidden": "bfloat16"}, {"hidden": pieces})


async def through(pair: Pair, sent: tuple[Payload, ...]) -> None:
    """Every row as it was sent."""
    problems: list[str] = []
    note = lambda *what: problems.append(str(what))  # noqa: E731
    pump = Pump(pair.up, "r", EDGE, lambda *_: None, note, note)
    await pair.down.open("r", producer(pair.up))
    for payload in sent:
        pump.add(payload)
        back = (await a_chunk(pair.down)).payload
        assert (back.start, back.rows, back.finished, back.meta) == (
            payload.start,
            payload.rows,
            payload.finished,
            {"n": 1},
        )
        assert np.array_equal(back.tensors["token_ids"], payload.tensors["token_ids"])
        assert np.array_equal(back.tensors["hidden"], np.concatenate(payload.parts["hidden"]))
        assert back.dtypes == {"hidden": "bfloat16"}
        del back
    await asyncio.wait_for(pump.task, 20)
    assert not problems
    await pair.nothing_left()


async def test_pieces_are_joined_in_the_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_second_copy(*_: object) -> None:
        raise AssertionError("the bytes were copied once more")

    monkeypatch.setattr(payloads, "write", no_second_copy)
    async with a_pair(Site(tmp_path), "same pod") as pair:
        await through(pair, (in_pieces(0, ROWS, False), in_pieces(ROWS, ROWS, True)))


async def test_small_pieces_and_a_full_arena(tmp_path: Path) -> None:
    async with a_pair(Site(tmp_path), "same pod", arena_bytes=MIB, up=ClientLimits(arena_wait_s=0.05)) as pair:
        kept = await pair.up.reserve({"x": ((200_000,), "uint8")})
        assert kept is not None
        await through(pair, (in_pieces(0, 3, False), in_pieces(3, 4 * ROWS, True)))
