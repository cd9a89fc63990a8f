"""The producing half of the client: outgoing streams, their credits and the way of a chunk into the arena."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from omni_runtime.connectors import payloads, wire
from omni_runtime.connectors.api import Reservation
from omni_runtime.connectors.arena import largest_slab
from omni_runtime.connectors.attachment import Attachment, SlabReservation
from omni_runtime.connectors.limits import ClientLimits, StreamId
from omni_runtime.connectors.line import Held, Room
from omni_runtime.connectors.tensors import MAX_CHUNK_BYTES, ChunkHeader
from omni_runtime.connectors.wire import FRAGMENT_BYTES, INLINE_BYTES, WINDOW_PIECES, Put, Slab
from omni_runtime.errors import CapacityExceeded, DeadlineExceeded, OmniError, StreamClosed, UpstreamLost, by_code
from omni_runtime.protocol.payload import Payload

_REMEMBERED: Final = 65_536
_REPORTED: Final = 256  # chunks on the line that the sidecar is told of at once


@dataclass(slots=True, eq=False)
class Outgoing:
    id: StreamId
    number: int
    attachment: Attachment
    credits: int = WINDOW_PIECES
    seq: int = 0
    finished: bool = False
    line: tuple[int, int] | None = None  # session of the consumer or of the line to its pod, token
    on_line: bool = False  # something of it has gone on the line
    direct: list[tuple[int, float]] = field(default_factory=list)  # sent on the line, and not told to the sidecar yet
    error: tuple[type[OmniError], str] | None = None
    starved: bool = False  # the sidecar has heard that it stands still
    puts: int = 0  # that have the lock, or wait for it
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: asyncio.Future[None] | None = None  # of the put that has the lock and no credit
    deadline: float = 0.0  # of that put

    @property
    def stands(self) -> bool:
        return not self.credits or self.waiting is not None

    def check(self) -> None:
        """Raise why the stream ended: a new exception each time, a shared one would collect tracebacks and payloads."""
        if self.error is not None:
            kind, message = self.error
            raise kind(message)

    def end(self, kind: type[OmniError], message: str) -> None:
        if self.error is None:
            self.error = (kind, message)
        self.move()

    def move(self) -> None:
        """Let the put that waits look again."""
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)


class Sender:
    def __init__(
        self,
        limits: ClientLimits,
        numbers: Iterator[int],
        current: Callable[[], Attachment | None],
        attached: Callable[[], Awaitable[Attachment]],
    ) -> None:
        self._limits = limits
        self._numbers = numbers
        self._current = current
        self._attached = attached
        self._ports: dict[int, Outgoing] = {}
        self._streams: dict[StreamId, Outgoing] = {}
        # Request -> edge: (where, its number) of finished streams, for an abort.
        self._sent: OrderedDict[str, dict[str, tuple[Attachment, int]]] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()  # requests that were cleaned up
        self._unreported: dict[int, Outgoing] = {}
        self._waiting: set[Outgoing] = set()  # for credits

    def __len__(self) -> int:
        return len(self._ports)

    async def reserve(self, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> SlabReservation | None:
        """See api.EdgeClient.reserve."""
        _, length = payloads.lay_out(shapes)
        attachment = self._current() or await self._attached()
        if not 0 < length <= min(largest_slab(attachment.arena.length), self._limits.max_chunk_bytes):
            return None
        slab = attachment.take_room(length) or await attachment.allocate(length, self._limits.arena_wait_s)
        return None if slab is None else attachment.reserve(slab, shapes)

    async def put(self, request: str, edge: str, payload: Payload, reservation: Reservation | None = None) -> None:
        """See api.EdgeClient.put."""
        limits = self._limits
        header = payloads.describe(payload)
        if header.nbytes > limits.max_chunk_bytes or header.nbytes > MAX_CHUNK_BYTES:
            raise CapacityExceeded(
                f"chunk of {header.nbytes} bytes on {edge} of request {request};"
                f" at most {limits.max_chunk_bytes} are allowed"
            )
        stream = self._streams.get((request, edge))
        if stream is not None and reservation is None and self._put_at_once(stream, payload, header):
            return
        deadline = asyncio.get_running_loop().time() + limits.put_deadline_s
        if stream is None:
            stream = self._bind((request, edge), self._current() or await self._attached())
        stream.puts += 1
        try:
            async with stream.lock:
                await self._put(stream, payload, header, deadline, reservation)
        finally:
            stream.puts -= 1

    def _put_at_once(self, stream: Outgoing, payload: Payload, header: ChunkHeader) -> bool:
        """Most chunks of a model: they are small and there is nothing to wait for."""
        if stream.puts or not stream.credits or not self._send_direct(stream, payload, header):
            return False
        stream.credits -= 1
        stream.seq += 1
        return True

    async def _put(
        self,
        stream: Outgoing,
        payload: Payload,
        header: ChunkHeader,
        deadline: float,
        reservation: Reservation | None,
    ) -> None:
        request, edge = stream.id
        stream.check()
        if stream.finished:
            raise StreamClosed(f"put on {edge} of request {request} after its finished chunk")
        sent = False
        try:
            if payload.finished and stream.on_line:
                await self._written(stream, deadline)
            await self._send_chunk(stream, payload, header, deadline, reservation)
            sent = True
        finally:
            if not sent and stream.error is None:  # part of a chunk, or a gap: the stream cannot go on
                self._cancel(stream, "put was interrupted")
                stream.end(StreamClosed, f"{edge} of request {request}: an earlier put was interrupted")
        stream.seq += 1
        if payload.finished:
            self._finish(stream)

    def _bind(self, id: StreamId, attachment: Attachment) -> Outgoing:
        request, edge = id
        if id in self._streams:  # another put was here while this one waited for the sidecar
            return self._streams[id]
        if request in self._over:
            raise StreamClosed(f"put on {edge}: request {request} is over in this replica")
        if edge in self._sent.get(request, ()):
            raise StreamClosed(f"put on {edge} of request {request} after its finished chunk")
        stream = Outgoing(id, next(self._numbers), attachment)
        self._streams[id] = self._ports[stream.number] = stream
        attachment.send(wire.Bind(stream.number, edge, request))
        return stream

    def _finish(self, stream: Outgoing) -> None:
        """From here on the stream belongs to the sidecar; only an abort still needs its number."""
        stream.finished = True
        self._streams.pop(stream.id, None)
        self._ports.pop(stream.number, None)
        request, edge = stream.id
        self._sent.setdefault(request, {})[edge] = stream.attachment, stream.number
        if len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)

    async def _send_chunk(
        self,
        stream: Outgoing,
        payload: Payload,
        header: ChunkHeader,
        deadline: float,
        reservation: Reservation | None,
    ) -> None:
        attachment, length = stream.attachment, header.nbytes
        slab: Slab | None = None
        copy = False
        if isinstance(reservation, SlabReservation) and reservation.holds(payload) and attachment.take(reservation):
            slab = reservation.slab
        elif INLINE_BYTES < length <= largest_slab(attachment.arena.length):
            slab = attachment.take_room(length) or await attachment.allocate(length, self._limits.arena_wait_s)
            copy = True
        if slab is None:
            await self._send_pieces(stream, payload, header, deadline)
            return
        try:
            if copy:
                payloads.write(payload, header, attachment.arena.view[slab.offset : slab.offset + length])
            await self._credit(stream, length, deadline)
        except BaseException:
            attachment.free_unsent(slab)
            raise
        self._report(stream)
        attachment.send(Put(stream.number, stream.seq, 0, True, length, slab, header))

    async def _send_pieces(self, stream: Outgoing, payload: Payload, header: ChunkHeader, deadline: float) -> None:
        """A chunk that is small, larger than any slab, or finds the arena full."""
        attachment, length = stream.attachment, header.nbytes
        limit = largest_slab(attachment.arena.length)
        if length <= INLINE_BYTES:
            if not stream.credits:
                await self._credit(stream, length, deadline)
            else:
                stream.credits -= 1
            if self._send_direct(stream, payload, header):
                return
            if not attachment.is_writable:
                await attachment.writable()
            stream.check()
            self._report(stream)
            put = Put(stream.number, stream.seq, 0, True, length, None, header)
            attachment.send(put, payloads.flat(payload, header))
            return
        data = memoryview(payloads.flat(payload, header))
        at = piece = 0
        while piece == 0 or at < length:
            slab = None
            if length > limit:
                slab = await attachment.allocate(min(length - at, limit), self._limits.arena_wait_s)
            part = slab.length if slab is not None else min(length - at, FRAGMENT_BYTES)
            try:
                if slab is not None:
                    attachment.arena.view[slab.offset : slab.offset + part] = data[at : at + part]
                await self._credit(stream, part, deadline)
                await attachment.writable()
                stream.check()
            except BaseException:
                if slab is not None:
                    attachment.free_unsent(slab)
                raise
            last = at + part == length
            put = Put(stream.number, stream.seq, piece, last, part, slab, header if piece == 0 else None)
            self._report(stream)
            attachment.send(put, b"" if slab is not None else data[at : at + part])
            at, piece = at + part, piece + 1

    def _send_direct(self, stream: Outgoing, payload: Payload, header: ChunkHeader) -> bool:
        """On the line, if there is one and it takes the chunk now. The last chunk goes where streams end: the sidecar."""
        lines = stream.attachment.lines
        if stream.line is None or lines is None or stream.error is not None:
            return False
        if not stream.attachment.is_writable:  # a sidecar that hears nothing: what it is to be told must not pile up
            return False
        if header.finished or header.nbytes > INLINE_BYTES:
            return False
        session, token = stream.line
        if not lines.send(session, token, stream.number, stream.seq, header, payloads.flat(payload, header)):
            return False
        stream.on_line = True
        self._unreported[stream.number] = stream
        stream.direct.append((header.nbytes, time.time() - header.sent_at))
        if len(stream.direct) == _REPORTED:
            self._report(stream)
        return True

    async def _written(self, stream: Outgoing, deadline: float) -> None:
        """A finished stream is delivered though this engine ends: nothing of it may be left here."""
        stream.attachment.flush_line()
        lines = stream.attachment.lines
        if lines is None or stream.line is None:
            return
        try:
            async with asyncio.timeout_at(deadline):
                await lines.written(stream.line[0])
        except TimeoutError:
            raise DeadlineExceeded(
                f"put on {stream.id[1]} of request {stream.id[0]}: the consumer's pod took nothing off its line within"
                f" {self._limits.put_deadline_s:g} s"
            ) from None

    def report(self) -> None:
        """Tell the sidecar of what went past it: for its numbers, and so that it takes no stream for an orphan."""
        streams, self._unreported = self._unreported, {}
        for stream in streams.values():
            if not stream.finished and (stream.direct or stream.starved != stream.stands):
                self._report(stream, always=True)

    def _report(self, stream: Outgoing, *, always: bool = False) -> None:
        """Before anything else is said of the stream."""
        stream.attachment.flush_line()
        if stream.direct or always:
            stream.starved = stream.stands
            stream.attachment.send(wire.Bypassed(stream.number, tuple(stream.direct), stream.starved), hurry=False)
            stream.direct = []

    async def _credit(self, stream: Outgoing, length: int, deadline: float) -> None:
        """Deadlines are looked at by the clock of all streams (`check_deadlines`): a timer for each wait costs as much
        as the chunk that it waits for.
        """
        loop = asyncio.get_running_loop()
        kept = wire.kept_back(length)
        while stream.error is None and stream.credits <= kept:
            if loop.time() >= deadline:
                raise DeadlineExceeded(
                    f"put on {stream.id[1]} of request {stream.id[0]}: the consumer granted nothing within"
                    f" {self._limits.put_deadline_s:g} s"
                )
            stream.deadline = deadline
            stream.waiting = loop.create_future()
            self._waiting.add(stream)
            if stream.on_line:
                self._unreported[stream.number] = stream
            try:
                await stream.waiting
            finally:
                stream.waiting = None
                self._waiting.discard(stream)
        stream.check()
        stream.credits -= 1

    def check_deadlines(self, now: float) -> None:
        """R5: a consumer that takes nothing."""
        for stream in [s for s in self._waiting if now >= s.deadline]:
            stream.move()

    def _cancel(self, stream: Outgoing, reason: str) -> None:
        self._report(stream)
        self._ports.pop(stream.number, None)
        stream.attachment.send(wire.Cancel(stream.number, reason[:2000]))

    # --- what others say

    def on_credit(self, number: int, pieces: int) -> None:
        stream = self._ports.get(number)
        if stream is not None:
            self._credited(stream, pieces)

    def on_room(self, room: Room) -> None:
        """From the consumer itself, for what went on its line."""
        stream = self._ports.get(room.stream)
        if stream is not None and stream.line is not None and stream.line[1] == room.token:
            self._credited(stream, room.pieces)

    def _credited(self, stream: Outgoing, pieces: int) -> None:
        if stream.starved:
            self._unreported[stream.number] = stream
        stream.credits += pieces
        stream.move()

    def on_refused(self, chunks: list[Held]) -> None:
        """What the line did not take takes the usual way, in order, and before anything that is put later."""
        streams = [self._ports.get(number) for _, number, *_ in chunks]
        for stream in streams:
            if stream is not None:
                stream.direct.pop()
        for stream, (_, number, seq, header, body) in zip(streams, chunks, strict=True):
            if stream is not None and stream.error is None:
                self._report(stream)
                stream.attachment.send(Put(number, seq, 0, True, header.nbytes, None, header), body)

    def on_paired(self, paired: wire.Paired) -> None:
        stream = self._ports.get(paired.stream)
        if stream is not None and stream.attachment.lines is not None:
            stream.line = paired.session, paired.token
            stream.attachment.lines.want(paired.session)

    def line_lost(self, attachment: Attachment, session: int) -> None:
        """A line to another pod: whether what was on it has come is known of what the consumer has given room for."""
        for stream in [s for s in self._ports.values() if s.attachment is attachment]:
            if stream.line is None or stream.line[0] != session:
                continue
            if stream.on_line and stream.credits < WINDOW_PIECES:
                reason = "the line to its consumer is gone"
                self._cancel(stream, reason)
                stream.end(StreamClosed, f"{stream.id[1]} of request {stream.id[0]}: {reason}")

    def on_failed(self, number: int, code: str, message: str) -> None:
        stream = self._ports.pop(number, None)
        if stream is not None:
            stream.end(by_code(code), message)

    def sidecar_lost(self, attachment: Attachment, reason: str) -> None:
        for stream in [s for s in self._ports.values() if s.attachment is attachment]:
            del self._ports[stream.number]
            stream.end(UpstreamLost, f"{stream.id[1]}: the connector sidecar is gone ({reason})")

    def end_request(self, request: str, reason: str, *, drop_finished: bool) -> None:
        self._over[request] = None
        self._over.move_to_end(request)
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        for id in [i for i in self._streams if i[0] == request]:
            stream = self._streams.pop(id)
            if stream.error is None:
                self._cancel(stream, reason)
            stream.end(StreamClosed, f"{id[1]}: request {request} is over in this replica")
        if drop_finished:  # a cleanup keeps them known: an abort may follow when their consumer turns out to be dead
            for attachment, number in self._sent.pop(request, {}).values():
                attachment.send(wire.Cancel(number, reason[:2000]))

    def is_over(self, request: str) -> bool:
        return request in self._over

    def close(self) -> None:
        self.report()
        for stream in self._streams.values():
            stream.end(StreamClosed, "the connector client is closed")
