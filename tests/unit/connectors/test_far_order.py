"""Two ways from another pod, each in order and neither in step with the other: in order together, or a reason."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_runtime.connectors import wire
from omni_runtime.connectors.api import ChunkReceived, EdgeEvent, EdgeFailed
from omni_runtime.connectors.limits import ClientLimits
from omni_runtime.connectors.line import Direct
from omni_runtime.connectors.payloads import describe, flat
from omni_runtime.connectors.receiver import Incoming, Receiver
from omni_runtime.connectors.tensors import ChunkHeader
from omni_runtime.connectors.wire import WINDOW_PIECES, Put, Slab
from tests.unit.connectors.kit import EDGE, rows, some_bytes

SESSION = 7
MANY = settings(max_examples=300, deadline=None)


@dataclass(eq=False)
class Sidecar:
    """In place of an attachment: what is said to the sidecar, and slabs that it has lent."""

    said: list[wire._Message] = field(default_factory=list)
    lent: dict[Slab, bytes] = field(default_factory=dict)

    def send(self, message: wire._Message, *_: object, **__: object) -> None:
        self.said.append(message)

    @property
    def lines(self) -> Sidecar:
        return self

    def want(self, session: int) -> None:
        assert session == SESSION

    def give_room(self, *_: object) -> bool:
        return True

    def drain_line(self) -> None:
        """Nothing is there that the test has not given."""

    def release(self, slab: Slab) -> None:
        del self.lent[slab]  # once

    def keep(self, _: Slab) -> bool:
        return True

    @property
    def arena(self) -> Sidecar:
        return self

    def data(self, slab: Slab) -> memoryview:
        return memoryview(self.lent[slab])

    def view(self, slab: Slab, data: memoryview) -> object:
        del self.lent[slab]
        return np.frombuffer(bytes(data), np.uint8)


def content(seq: int) -> bytes:
    return some_bytes(10 + seq, seq).tobytes()


def header_and_bytes(seq: int, *, finished: bool) -> tuple[ChunkHeader, bytes]:
    payload = rows(some_bytes(10 + seq, seq), start=seq, finished=finished)
    header = describe(payload)
    return header, bytes(flat(payload, header))


class Stream:
    """Chunks whose ways are given; the last goes by the sidecars."""

    def __init__(self, ways: list[str]) -> None:
        self.receiver = Receiver(ClientLimits(), itertools.count(1))
        self.sidecar = Sidecar()
        self.stream: Incoming = self.receiver.new(("r", EDGE), "p", self.sidecar, withhold=False, far=True)  # type: ignore[arg-type]
        self.ways: dict[str, list[int]] = {"line": [], "sidecars": [], "arena": []}
        ways = [*ways, "sidecars"]
        self.last = len(ways) - 1
        self.usual = [(n, way) for n, way in enumerate(ways) if way != "line"]
        self.direct = [n for n, way in enumerate(ways) if way == "line"]
        self.events: list[EdgeEvent] = []

    def from_line(self) -> None:
        seq = self.direct.pop(0)
        header, body = header_and_bytes(seq, finished=False)
        direct = Direct(
            self.stream.token, 1, 1, seq, header.start, header.rows, 0.0, wire.encode(header.tensors), {}, body
        )  # type: ignore[arg-type]
        self.receiver.on_direct(direct, header, SESSION)

    def from_sidecars(self) -> None:
        seq, way = self.usual.pop(0)
        header, body = header_and_bytes(seq, finished=seq == self.last)
        slab = None
        if way == "arena":
            slab = Slab(seq << 12, len(body), seq + 1)
            self.sidecar.lent[slab], body = body, b""
        self.receiver.on_put(self.sidecar, Put(self.stream.number, seq, 0, True, header.nbytes, slab, header), body)  # type: ignore[arg-type]

    async def take(self) -> None:
        while self.receiver.queued_events:
            self.events.append(await self.receiver.next_event())

    def check(self) -> str:
        """ "whole", "failed" or "open"; raises unless what came is in order and exact, and nothing is kept after an end."""
        chunks = [e for e in self.events if isinstance(e, ChunkReceived)]
        assert [c.seq for c in chunks] == list(range(len(chunks)))
        assert all(c.payload.tensors["rows"].tobytes() == content(c.seq) for c in chunks)
        failures = [e for e in self.events if isinstance(e, EdgeFailed)]
        assert failures == self.events[len(chunks) :], "nothing follows the end"
        over = bool(failures) or (bool(chunks) and chunks[-1].payload.finished)
        if over:
            assert not self.sidecar.lent
            assert not self.receiver._ports and not self.receiver._tokens
        if failures:
            assert failures[0].code == "UpstreamLost"
            assert wire.Cancel in map(type, self.sidecar.said), "the other end is told"
        return "failed" if failures else "whole" if over else "open"


WAYS = st.lists(st.sampled_from(["line", "sidecars", "arena"]), max_size=WINDOW_PIECES)


@MANY
@given(ways=WAYS, data=st.data())
def test_any_interleaving_is_put_in_order(ways: list[str], data: st.DataObject) -> None:
    """R18, R19: whichever is ahead."""

    async def run() -> None:
        stream = Stream(ways)
        while stream.direct or stream.usual:
            turn = data.draw(st.booleans()) if stream.direct and stream.usual else bool(stream.direct)
            stream.from_line() if turn else stream.from_sidecars()
            if data.draw(st.booleans()):
                await stream.take()
        await stream.take()
        assert stream.check() == "whole"

    asyncio.run(run())


@MANY
@given(ways=WAYS, data=st.data())
def test_what_a_lost_line_keeps_is_told(ways: list[str], data: st.DataObject) -> None:
    """R11, R18: exact if nothing was on it any more, and otherwise failed: at once, or when something later comes."""

    async def run() -> None:
        stream = Stream(ways)
        for _ in range(data.draw(st.integers(0, len(ways)))):
            turn = data.draw(st.booleans()) if stream.direct and stream.usual else bool(stream.direct)
            stream.from_line() if turn else stream.from_sidecars()
        lost, heard = bool(stream.direct), stream.stream.source is not None
        stream.direct.clear()
        stream.receiver.line_lost(stream.sidecar, SESSION)  # type: ignore[arg-type]
        while stream.usual:
            stream.from_sidecars()
        await stream.take()
        if stream.check() == "open":  # of a stream that has heard nothing on the line, its end is not known
            assert not heard
            stream.receiver.check_deadlines(stream.stream.held_due + 0.001)
            await stream.take()
        assert stream.check() == ("failed" if lost else "whole")

    asyncio.run(run())


@MANY
@given(ways=WAYS, data=st.data())
def test_no_chunk_is_left_out_in_silence(ways: list[str], data: st.DataObject) -> None:
    """R18: one is lost on either way, while both work."""
    lost = data.draw(st.integers(0, max(0, len(ways) - 1)))

    async def run() -> None:
        stream = Stream(ways)
        stream.direct = [n for n in stream.direct if n != lost]
        stream.usual = [(n, way) for n, way in stream.usual if n != lost]
        while stream.direct or stream.usual:
            turn = data.draw(st.booleans()) if stream.direct and stream.usual else bool(stream.direct)
            stream.from_line() if turn else stream.from_sidecars()
        stream.receiver.check_deadlines(stream.stream.held_due + 0.001)
        await stream.take()
        if stream.check() == "open":  # all that came is ahead, and on the line: a deadline of the stream's own
            stream.receiver.check_deadlines(stream.stream.due + 0.001)
            await stream.take()
            assert isinstance(stream.events[-1], EdgeFailed)
        else:
            assert stream.check() == "failed"

    asyncio.run(run())
