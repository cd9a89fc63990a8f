"""Two windows of one stream: many small pieces, few large ones (of the arena, or of a spill)."""

from __future__ import annotations

import asyncio

import pytest

from omni_runtime.connectors.streams import Drop, Key, Limits, Piece, Port, StreamTable
from omni_runtime.connectors.tensors import ChunkHeader
from omni_runtime.connectors.wire import INLINE_BYTES, WINDOW_LARGE, WINDOW_PIECES, Put
from tests.unit.connectors.kit import EDGE, Site, a_chunk, a_pair, producer, rows, some_bytes, until
from tests.unit.connectors.line_kit import LARGE, SMALL, a_paired_stream, put_small
from tests.unit.connectors.test_streams import delivered, failures

KEY = Key("thinker-0", "thinker->talker", "r")
P, C = Port(1, 1), Port(2, 1)
BIG = INLINE_BYTES + 1


def piece(seq: int, length: int, *, number: int = 0, last: bool = True) -> Piece:
    chunk = ChunkHeader(seq, 1, False, length, 0.0) if number == 0 else None
    return Piece(Put(1, seq, number, last, length, None, chunk), b"")


@pytest.fixture
def table() -> StreamTable:
    table = StreamTable(Limits())
    table.bind(P, KEY, 0)
    return table


@pytest.mark.parametrize(("length", "most"), [(INLINE_BYTES, WINDOW_PIECES), (BIG, WINDOW_LARGE)])
def test_a_producer_may_have_so_many_waiting(table: StreamTable, length: int, most: int) -> None:
    for n in range(most):
        assert table.put(P, piece(n, length), 0) == []
    actions = table.put(P, piece(most, length), 0)
    assert failures(actions) == [(P, "ProtocolError")]
    assert sum(isinstance(a, Drop) for a in actions) == most + 1


def test_a_large_piece_counts_the_small_ones_before_it(table: StreamTable) -> None:
    for n in range(WINDOW_LARGE):
        table.put(P, piece(n, 1), 0)
    assert failures(table.put(P, piece(WINDOW_LARGE, BIG), 0)) == [(P, "ProtocolError")]


def test_a_consumer_gets_few_large_pieces_ahead_of_its_credits(table: StreamTable) -> None:
    """R26: one that takes nothing holds so much of the arena and no more, whatever else waits behind them."""
    table.open(C, KEY, "t", WINDOW_PIECES, 0)
    sent = [seq for n in range(WINDOW_LARGE) for seq in delivered(table.put(P, piece(n, BIG), 0))]
    assert sent == list(range(WINDOW_LARGE))
    assert delivered(table.put(P, piece(WINDOW_LARGE, BIG), 0)) == []
    assert delivered(table.put(P, piece(WINDOW_LARGE + 1, 1), 0)) == [], "in order"
    assert delivered(table.credit(C, 1, 0)) == [WINDOW_LARGE, WINDOW_LARGE + 1]


def test_that_a_stream_stands_still_may_be_said_amid_a_chunk(table: StreamTable) -> None:
    table.open(C, KEY, "t", WINDOW_PIECES, 0, token=1)
    table.put(P, piece(0, BIG, last=False), 0)
    assert table.bypassed(P, (), 0, starved=True) == []
    assert [n for _, _, n in table.waiting()] == [WINDOW_PIECES]
    assert table.bypassed(P, (), 0, starved=False) == []
    assert list(table.waiting()) == []
    assert len(failures(table.bypassed(P, ((1, 0.0),), 0))) == 2, "but nothing can have gone past the sidecar"


@pytest.mark.parametrize("mode", ["same pod", "two pods"])
async def test_a_consumer_that_takes_nothing_holds_few_slabs(site: Site, mode: str) -> None:
    async with a_pair(site, mode) as pair:
        await pair.down.open("r", producer(pair.up))
        sent = 0

        async def send() -> None:
            nonlocal sent
            for n in range(4 * WINDOW_PIECES):
                await pair.up.put("r", EDGE, rows(some_bytes(LARGE, n), start=n, finished=n == 4 * WINDOW_PIECES - 1))
                sent = n + 1

        sending = asyncio.create_task(send())
        # At each hop as many as may wait: at the engine, in its sidecar, and on the way to it.
        await until(lambda: sent >= 2 * WINDOW_LARGE and bool(pair.up._sender._waiting))
        for _ in range(20):
            await pair.up.health()
            await pair.down.health()
        assert sent <= 4 * WINDOW_LARGE
        got = [(await a_chunk(pair.down)).seq for _ in range(4 * WINDOW_PIECES)]
        assert got == list(range(4 * WINDOW_PIECES))
        await sending
        await pair.nothing_left()


@pytest.mark.parametrize("mode", ["same pod", "two pods", "mooncake"])
@pytest.mark.parametrize("seed", range(3))
async def test_large_and_small_chunks_never_wait_for_each_other_for_good(site: Site, mode: str, seed: int) -> None:
    """R5: what a consumer has taken and not granted yet is less than a large piece needs."""
    sizes = [LARGE if (n * 7 + seed * n * n) % 11 < 3 + seed else SMALL for n in range(6 * WINDOW_PIECES)]
    async with a_pair(site, mode) as pair:
        await a_paired_stream(pair)

        async def send() -> None:
            for n, size in enumerate(sizes, 1):
                await pair.up.put("r", EDGE, rows(some_bytes(size, n), start=n, finished=n == len(sizes)))

        sending = asyncio.create_task(send())
        got = [await a_chunk(pair.down) for _ in sizes]
        assert [c.seq for c in got] == list(range(1, len(sizes) + 1))
        assert [c.payload.tensors["rows"].nbytes for c in got] == sizes
        await sending
        del got
        await pair.nothing_left()


async def test_a_large_chunk_that_waits_for_what_is_on_the_line_is_told(site: Site) -> None:
    """R11: the sidecar's numbers show the stream as one that stands still, and no longer once it goes on."""
    async with a_pair(site, "same pod") as pair:
        await a_paired_stream(pair)
        await put_small(pair, *range(1, WINDOW_LARGE + 1))
        large = asyncio.create_task(
            pair.up.put("r", EDGE, rows(some_bytes(LARGE, 99), start=WINDOW_LARGE + 1, finished=True))
        )
        table = pair.hosts[0].sidecar.hub.table
        await until(lambda: [n for _, _, n in table.waiting()] == [WINDOW_PIECES])
        got = [(await a_chunk(pair.down)).seq for _ in range(WINDOW_LARGE + 1)]
        await large
        assert got == list(range(1, WINDOW_LARGE + 2))
        assert list(table.waiting()) == []
        await pair.nothing_left()
