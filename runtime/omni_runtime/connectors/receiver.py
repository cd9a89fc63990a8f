"""The consuming half of the client: incoming streams, and the events that the worker takes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from omni_runtime.connectors import payloads, wire
from omni_runtime.connectors.api import ChunkReceived, EdgeEvent, EdgeFailed
from omni_runtime.connectors.attachment import Attachment
from omni_runtime.connectors.inbound import Assembled, Duplicate, Inbound
from omni_runtime.connectors.limits import ClientLimits, StreamId
from omni_runtime.connectors.line import Direct
from omni_runtime.connectors.tensors import ChunkHeader, ProtocolError
from omni_runtime.connectors.wire import Put, Slab
from omni_runtime.errors import CapacityExceeded, DeadlineExceeded, StreamClosed, UpstreamLost

# Together less than WINDOW_LARGE: what is taken and not granted yet never keeps a large piece waiting.
_GRANT: Final = wire.WINDOW_LARGE // 4
_GRANT_DIRECT: Final = wire.WINDOW_LARGE // 2
_REPORTED: Final = 256  # chunks that the sidecar is told of at once


@dataclass(slots=True, eq=False)
class Incoming:
    id: StreamId
    number: int
    attachment: Attachment
    inbound: Inbound
    producer: str  # replica
    withhold: bool  # fullPayload: all chunks together, once the last is here
    far: bool  # the producer is in another pod: what is on the line and what sidecars bring are not in step
    due: float
    token: int  # what the stream is called on the line
    # With the slab that it is a view of, and whether it came on the line.
    queue: deque[tuple[EdgeEvent, Slab | None, bool]] = field(default_factory=deque)
    early: deque[tuple[Direct, ChunkHeader]] = field(default_factory=deque)  # ahead of what comes the usual way
    held: deque[tuple[Put, bytes]] = field(default_factory=deque)  # the usual way, ahead of what is on a line from afar
    held_due: float = 0.0
    line_gone: bool = False  # nothing more comes on it
    withheld: list[ChunkReceived] = field(default_factory=list)
    withheld_bytes: int = 0
    taken: int = 0  # pieces that are not granted again yet
    source: tuple[int, int] | None = None  # session of the producer on the line, and what it calls the stream
    direct: int = 0  # chunks from the line that are not granted again yet
    direct_taken: int = 0  # of these, taken by the worker
    ended: bool = False  # the last event is queued, or nobody wants any


class Events:
    """Not a generator: its frame would keep the last payload, and with it a slab, until the next event."""

    def __init__(self, take: Callable[[], Awaitable[EdgeEvent]]) -> None:
        self._take = take

    def __aiter__(self) -> Events:
        return self

    def __anext__(self) -> Awaitable[EdgeEvent]:
        return self._take()


class Receiver:
    def __init__(self, limits: ClientLimits, numbers: Iterator[int]) -> None:
        self._limits = limits
        self._numbers = numbers
        self._ports: dict[int, Incoming] = {}
        self._tokens: dict[int, Incoming] = {}
        self._seen: dict[tuple[Attachment, str, str], list[float]] = {}  # off lines from other pods, and not told yet
        self._streams: dict[StreamId, Incoming] = {}
        self._ready: deque[Incoming] = deque()
        self._event = asyncio.Event()
        self._closed = False
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._ports)

    @property
    def queued_events(self) -> int:
        return sum(len(stream.queue) for stream in self._streams.values())

    def new(self, id: StreamId, producer: str, attachment: Attachment, *, withhold: bool, far: bool) -> Incoming:
        if id in self._streams:
            raise StreamClosed(f"open of {id[1]}: request {id[0]} has this stream open already")
        due = self._loop.time() + self._limits.chunk_deadline_s
        inbound = Inbound(self._limits.max_chunk_bytes)
        token = secrets.randbits(62) + 1
        stream = Incoming(id, next(self._numbers), attachment, inbound, producer, withhold, far, due, token)
        self._streams[id] = self._ports[stream.number] = self._tokens[token] = stream
        return stream

    # --- to the worker

    async def next_event(self) -> EdgeEvent:
        """Raises StopAsyncIteration after `close`."""
        while not self._closed:
            if not self._ready:
                self._event.clear()
                await self._event.wait()
                continue
            stream = self._ready.popleft()  # one event a stream in turn: fair between requests
            if not stream.queue:
                continue
            event, slab, direct = stream.queue.popleft()
            if stream.queue:
                self._ready.append(stream)
            elif stream.ended:
                self._streams.pop(stream.id, None)
            if isinstance(event, ChunkReceived):
                if slab is not None and not stream.attachment.keep(slab):
                    event = msgspec.structs.replace(event, payload=payloads.detached(event.payload))
                if not stream.withhold:
                    self._grant(stream, direct=direct)
            return event
        raise StopAsyncIteration

    def _push(self, stream: Incoming, event: EdgeEvent, slab: Slab | None = None, *, direct: bool = False) -> None:
        if not stream.queue:
            self._ready.append(stream)
            self._event.set()
        stream.queue.append((event, slab, direct))

    def _grant(self, stream: Incoming, *, direct: bool) -> None:
        """A part of the window at a time: a credit for each piece would be half of all messages."""
        if stream.ended:
            return
        if direct:
            stream.direct_taken += 1
            if stream.direct_taken >= _GRANT_DIRECT:
                self._give_room(stream, stream.direct_taken)
                stream.direct -= stream.direct_taken
                stream.direct_taken = 0
            return
        stream.taken += 1
        if stream.taken >= _GRANT:
            stream.attachment.send(wire.Credit(stream.number, stream.taken))
            stream.taken = 0

    def _give_room(self, stream: Incoming, pieces: int) -> None:
        """To the producer itself if that can be: its sidecar has nothing else to do with these chunks."""
        lines = stream.attachment.lines
        if lines is not None and stream.source is not None:
            session, number = stream.source
            if lines.give_room(session, stream.token, number, pieces):
                return
        stream.attachment.send(wire.Taken(stream.number, pieces))

    # --- from the sidecar

    def on_put(self, attachment: Attachment, put: Put, body: bytes) -> None:
        wire.check_body(put, len(body))
        stream = self._ports.get(put.stream)
        if stream is not None and stream.attachment is not attachment:
            raise ProtocolError("a piece of a stream that is open at another sidecar")
        if stream is not None and stream.inbound.is_early(put.seq, put.piece):
            attachment.drain_line()  # what belongs before it was sent before it
            stream = self._ports.get(put.stream)
        if stream is None:
            if put.slab is not None:
                attachment.release(put.slab)  # late: the request is over here
            return
        if stream.far and (stream.held or stream.inbound.is_early(put.seq, put.piece)):
            self._hold(stream, put, body)
        else:
            self._arrived(stream, put, body)
        self._catch_up(stream)

    def _hold(self, stream: Incoming, put: Put, body: bytes) -> None:
        """Until what is still on the line has come, or cannot come any more."""
        if not stream.held:
            stream.held_due = self._loop.time() + self._limits.line_wait_s
        stream.held.append((put, body))
        if stream.line_gone:
            self._miss(stream)

    def _catch_up(self, stream: Incoming) -> None:
        """Go on with what has been ahead. Each way is in order, so that what both are ahead of is lost."""
        while True:
            if stream.early and not stream.inbound.is_early(stream.early[0][0].seq):
                self._arrived_direct(stream, *stream.early.popleft())
            elif stream.held and not stream.inbound.is_early(stream.held[0][0].seq, stream.held[0][0].piece):
                self._arrived(stream, *stream.held.popleft())
            else:
                break
        if stream.early and stream.held:
            self._miss(stream)

    def _miss(self, stream: Incoming) -> None:
        reason = f"chunk {stream.inbound.expected} was on the line from its producer and has not come"
        self._cancel(stream, reason)
        self._fail(stream, UpstreamLost.code, f"{stream.id[1]}: {reason}")

    def line_lost(self, attachment: Attachment, session: int) -> None:
        """A line from another pod; what it had brought has been heard."""
        for stream in [s for s in self._ports.values() if s.attachment is attachment]:
            if stream.source is not None and stream.source[0] == session:
                stream.line_gone, stream.source = True, None
                if stream.held:
                    self._miss(stream)

    def on_direct(self, direct: Direct, header: ChunkHeader, session: int) -> None:
        """A chunk on the line to the producer of this session: it may be ahead of others that the sidecar brings."""
        stream = self._tokens.get(direct.token)
        if stream is None:
            return  # the request is over here
        if stream.source is None and stream.attachment.lines is not None:
            stream.source = session, direct.stream
            stream.attachment.lines.want(session)
        stream.direct += 1
        if stream.direct > wire.WINDOW_PIECES:
            self._break_off(stream, "the producer ignored its window")
        elif stream.early or stream.inbound.is_early(direct.seq):
            stream.early.append((direct, header))
        else:
            self._arrived_direct(stream, direct, header)
            if stream.held:
                stream.held_due = self._loop.time() + self._limits.line_wait_s
                self._catch_up(stream)

    def _arrived_direct(self, stream: Incoming, direct: Direct, header: ChunkHeader) -> None:
        stream.due = self._loop.time() + self._limits.chunk_deadline_s
        try:
            stream.inbound.next_whole(direct.seq, header)
        except Duplicate:
            return
        except ProtocolError as error:
            self._break_off(stream, str(error))
            return
        request, edge = stream.id
        seconds = max(0.0, time.time() - header.sent_at)
        if stream.far:
            self._saw(stream, seconds)
        chunk = ChunkReceived(request, edge, direct.seq, payloads.read(header, direct.body), seconds)
        self._received(stream, chunk, header, None, direct=True)

    def _saw(self, stream: Incoming, seconds: float) -> None:
        seen = self._seen.setdefault((stream.attachment, stream.id[1], stream.producer), [])
        seen.append(seconds)
        if len(seen) == _REPORTED:
            self.report()

    def report(self) -> None:
        """Tell the sidecar of what went past it, for its numbers."""
        seen, self._seen = self._seen, {}
        for (attachment, edge, producer), seconds in seen.items():
            attachment.send(wire.Received(edge, producer, tuple(seconds)), hurry=False)

    def _arrived(self, stream: Incoming, put: Put, body: bytes) -> None:
        attachment = stream.attachment
        stream.due = self._loop.time() + self._limits.chunk_deadline_s
        held = put.slab
        try:
            done = stream.inbound.accept(put, body if held is None else attachment.arena.data(held))
            if done is None:
                self._grant(stream, direct=False)
            else:
                data, view = self._take(stream, done, held)
                if view is not None:
                    held = None  # released with its last view
                seconds = max(0.0, time.time() - done.chunk.sent_at)
                chunk = ChunkReceived(*stream.id, done.seq, payloads.read(done.chunk, data), seconds)
                self._received(stream, chunk, done.chunk, view, direct=False)
        except Duplicate:
            pass
        except ProtocolError as error:
            self._break_off(stream, str(error))
        finally:
            if held is not None:
                attachment.release(held)

    def _break_off(self, stream: Incoming, reason: str) -> None:
        self._cancel(stream, reason)
        self._fail(stream, ProtocolError.code, f"{stream.id[1]}: {reason}")

    def _take(self, stream: Incoming, done: Assembled, slab: Slab | None) -> tuple[payloads.Bytes, Slab | None]:
        """(bytes of the chunk, the slab if that is where they are)."""
        if slab is None or not done.whole:
            return np.frombuffer(done.data, np.uint8), None
        if stream.withhold:
            return np.frombuffer(bytes(done.data), np.uint8), None
        assert isinstance(done.data, memoryview)
        return stream.attachment.view(slab, done.data), slab

    def _received(
        self, stream: Incoming, chunk: ChunkReceived, header: ChunkHeader, slab: Slab | None, *, direct: bool
    ) -> None:
        if header.finished:
            stream.ended = True
            self._close(stream)
        if not stream.withhold:
            self._push(stream, chunk, slab, direct=direct)
            return
        stream.withheld.append(chunk)
        stream.withheld_bytes += header.nbytes
        if stream.withheld_bytes > self._limits.max_withheld_bytes:
            self._cancel(stream, "too many bytes")
            text = f"{stream.id[1]}: more than {self._limits.max_withheld_bytes} bytes before the stream was finished"
            self._fail(stream, CapacityExceeded.code, text)
        elif stream.ended:
            for withheld in stream.withheld:
                self._push(stream, withheld)
            stream.withheld = []
        else:
            self._grant(stream, direct=direct)

    def on_failed(self, attachment: Attachment, number: int, code: str, message: str) -> None:
        stream = self._ports.get(number)
        if stream is None or stream.attachment is not attachment:
            return
        attachment.drain_line()
        if number in self._ports:
            self._fail(stream, code, message)

    def uses(self, attachment: Attachment) -> bool:
        return any(stream.attachment is attachment for stream in self._ports.values())

    def sidecar_lost(self, attachment: Attachment, reason: str) -> None:
        for stream in [s for s in self._ports.values() if s.attachment is attachment]:
            self._fail(stream, UpstreamLost.code, f"{stream.id[1]}: the connector sidecar is gone ({reason})")

    def check_deadlines(self, now: float) -> None:
        """R5: what upstream does not send in time fails; a stream that waits for our own worker does not."""
        for stream in [s for s in self._ports.values() if now > s.due and not s.queue]:
            self._cancel(stream, "chunk deadline")
            text = f"{stream.id[1]}: no chunk from upstream within {self._limits.chunk_deadline_s:g} s"
            self._fail(stream, DeadlineExceeded.code, text)
        for stream in [s for s in self._ports.values() if s.held and now > s.held_due]:
            self._miss(stream)

    def _close(self, stream: Incoming) -> None:
        """Nothing more may come."""
        self._ports.pop(stream.number, None)
        self._tokens.pop(stream.token, None)
        stream.early.clear()
        for put, _ in stream.held:
            if put.slab is not None:
                stream.attachment.release(put.slab)
        stream.held.clear()

    def _fail(self, stream: Incoming, code: str, message: str) -> None:
        self._close(stream)
        stream.ended = True
        stream.withheld = []
        shown = UpstreamLost.code if code == StreamClosed.code else code
        self._push(stream, EdgeFailed(*stream.id, shown, message))

    def _cancel(self, stream: Incoming, reason: str) -> None:
        self._close(stream)
        stream.attachment.send(wire.Cancel(stream.number, reason[:2000]))

    # --- ends

    def end_request(self, request: str, reason: str) -> None:
        for id in [i for i in self._streams if i[0] == request]:
            stream = self._streams.pop(id)
            if not stream.ended:
                self._cancel(stream, reason)
            self._discard(stream)

    def close(self) -> None:
        self.report()
        self._closed = True
        for stream in self._streams.values():
            self._discard(stream)
        self._event.set()

    def _discard(self, stream: Incoming) -> None:
        stream.ended = True
        stream.queue.clear()
        stream.withheld = []
