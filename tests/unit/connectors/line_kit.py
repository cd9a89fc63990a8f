"""What the tests of the line share: a stream that has one, small chunks, and ends that stand still."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import pytest

from omni_runtime.connectors.api import ChunkReceived
from omni_runtime.connectors.client import SidecarEdgeClient
from omni_runtime.connectors.engine_session import EngineSession
from omni_runtime.connectors.line import Lines
from omni_runtime.connectors.sealed_line import SealedLine
from tests.unit.connectors.kit import (
    EDGE,
    Pair,
    a_chunk,
    has_line,
    producer,
    rows,
    some_bytes,
    until,
)

SMALL = 1000
LARGE = 100_000  # through the arena


def lines(client: SidecarEdgeClient) -> Lines:
    attachment = client._current()
    assert attachment is not None and attachment.lines is not None
    return attachment.lines


async def a_paired_stream(pair: Pair, request: str = "r") -> None:
    """With its first chunk taken."""
    await pair.down.open(request, producer(pair.up))
    await pair.up.put(request, EDGE, rows(some_bytes(SMALL, 0)))
    assert (await a_chunk(pair.down)).seq == 0
    await until(lambda: has_line(pair.up, request))


async def a_far_stream(pair: Pair, request: str = "r") -> None:
    """Its first chunk has been taken, and one on the line."""
    await a_paired_stream(pair, request)
    await until(lambda: bool(far_lines(pair.down)))
    await put_small(pair, 1, request=request)
    assert exact([await a_chunk(pair.down)]) == [1]


async def another_far_stream(pair: Pair, other: SidecarEdgeClient, replica: str, request: str) -> None:
    """From another engine of the producer's pod, with its first chunk taken and a line."""
    await pair.down.open(request, producer(other, replica))
    await put_small(Pair(other, pair.down, pair.hosts), 0, request=request)
    assert exact([await a_chunk(pair.down)]) == [0]
    await until(lambda: has_line(other, request))


async def put_small(pair: Pair, *seqs: int, finished: bool = False, request: str = "r") -> None:
    for n in seqs:
        last = finished and n == seqs[-1]
        await pair.up.put(request, EDGE, rows(some_bytes(SMALL, n), start=n, finished=last))


def exact(chunks: list[ChunkReceived], size: int = SMALL) -> list[int]:
    assert all(np.array_equal(c.payload.tensors["rows"], some_bytes(size, c.seq)) for c in chunks)
    return [c.seq for c in chunks]


@asynccontextmanager
async def a_stuck_sidecar(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Callable[[], None]]]:
    """Delivers nothing to engines until the end of the block; yields what waits."""
    waiting: list[Callable[[], None]] = []
    deliver = EngineSession.deliver
    with monkeypatch.context() as patch:
        patch.setattr(EngineSession, "deliver", lambda *a: waiting.append(lambda: deliver(*a)))
        yield waiting
    for one in waiting:
        one()


@contextmanager
def a_reader_that_pauses(client: SidecarEdgeClient) -> Iterator[None]:
    """Its loop does not come to the line; what the sidecar sends it still hears."""
    reading = lines(client)
    reading._loop.remove_reader(reading._in)
    for far in far_lines(client):
        reading._loop.remove_reader(far._sock)
    try:
        yield
    finally:
        if not reading._closed:
            reading._loop.add_reader(reading._in, reading._read, 16)
        for far in far_lines(client):
            reading._loop.add_reader(far._sock, far._on_readable)


def far_lines(client: SidecarEdgeClient) -> list[SealedLine]:
    """To other pods, that work."""
    return [w.far for w in lines(client)._out.values() if w.far is not None and not w.far.closed]


@contextmanager
def a_line_that_lags(client: SidecarEdgeClient) -> Iterator[None]:
    """What is on lines from other pods comes later than everything that sidecars bring."""
    with pytest.MonkeyPatch.context() as patch, a_reader_that_pauses(client):
        patch.setattr(SealedLine, "drain", lambda _: None)
        yield
