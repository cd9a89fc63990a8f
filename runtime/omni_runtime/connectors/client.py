"""SidecarEdgeClient: the stage worker's end of the connector (connectors.api.EdgeClient)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from omni_runtime.connectors import payloads, wire
from omni_runtime.connectors.api import ChunkReceived, ConnectorHealth, EdgeEvent, EdgeFailed
from omni_runtime.connectors.arena import largest_slab
from omni_runtime.connectors.attachment import Attachment
from omni_runtime.connectors.inbound import Assembled, Duplicate, Inbound
from omni_runtime.connectors.ipc import SOCKET_NAME, Refusal
from omni_runtime.connectors.wire import (
    FRAGMENT_BYTES,
    INLINE_BYTES,
    WINDOW_PIECES,
    ChunkHeader,
    ProtocolError,
    Put,
    Slab,
)
from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.errors import CapacityExceeded, DeadlineExceeded, OmniError, StreamClosed, UpstreamLost, by_code
from omni_runtime.logs import get_logger
from omni_runtime.protocol.control import Producer
from omni_runtime.protocol.payload import Payload

log = get_logger(__name__)

_TICK_SECONDS: Final = 0.25
_DIAL_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_REMEMBERED: Final = 65_536
_PINNED_SHARE: Final = 4  # arrays may pin a quarter of the arena; beyond, chunks are copied out


@dataclass(frozen=True, slots=True)
class ClientLimits:
    put_deadline_s: float = 60.0  # wait for the consumer's credit
    chunk_deadline_s: float = 300.0  # wait for the next chunk of an open stream (R5)
    arena_wait_s: float = 1.0  # wait for room in the arena before a chunk goes inline
    max_chunk_bytes: int = 1 << 30
    max_withheld_bytes: int = 1 << 30  # of one fullPayload stream


StreamId = tuple[str, str]  # request, edge


@dataclass(slots=True, eq=False)
class _Tx:
    """An outgoing stream."""

    id: StreamId
    number: int
    attachment: Attachment
    credits: int = WINDOW_PIECES
    seq: int = 0
    finished: bool = False
    error: tuple[type[OmniError], str] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    moved: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Rx:
    """An incoming stream."""

    id: StreamId
    number: int
    attachment: Attachment
    inbound: Inbound
    withhold: bool
    due: float
    queue: deque[EdgeEvent] = field(default_factory=deque)
    withheld: list[ChunkReceived] = field(default_factory=list)
    withheld_bytes: int = 0
    ended: bool = False  # the last event is queued


class _Events:
    """Not a generator: its frame would keep the last payload, and with it a slab, until the next event."""

    def __init__(self, take: Callable[[], Awaitable[EdgeEvent]]) -> None:
        self._take = take

    def __aiter__(self) -> _Events:
        return self

    def __anext__(self) -> Awaitable[EdgeEvent]:
        return self._take()


def _check(tx: _Tx) -> None:
    """A new exception each time: a shared one would collect tracebacks, and with them payloads."""
    if tx.error is not None:
        kind, message = tx.error
        raise kind(message)


class SidecarEdgeClient:
    """See connectors.api.EdgeClient. Create it, and use it, inside one running loop."""

    def __init__(
        self, ipc_dir: Path, plan: ResolvedPlan, stage: str, replica: str, limits: ClientLimits | None = None
    ) -> None:
        self._path = ipc_dir / SOCKET_NAME
        self._plan = plan
        self._attach = wire.Attach(stage, replica, plan.revision, plan.contract_version)
        self._withheld = {edge.name for edge in plan.edges if edge.mode == "fullPayload"}
        self._limits = limits or ClientLimits()
        self._attachment: Attachment | None = None
        self._changed = asyncio.Event()  # attached, or given up
        self._why_not = "not tried yet"
        self._refusal: OmniError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = 0
        self._ports: dict[int, _Tx | _Rx] = {}
        self._tx: dict[StreamId, _Tx] = {}
        self._rx: dict[StreamId, _Rx] = {}
        self._sent: OrderedDict[str, dict[str, _Tx]] = OrderedDict()  # request -> edge; maybe not delivered: for abort
        self._over: OrderedDict[str, None] = OrderedDict()  # requests that were cleaned up
        self._ready: deque[_Rx] = deque()
        self._event = asyncio.Event()
        self._closed = False

    # --- the sidecar

    async def connect(self, deadline_s: float) -> None:
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._keep_attached()), loop.create_task(self._watch_deadlines())]
        await self._attached(deadline_s)

    @property
    def data_endpoint(self) -> str:
        return self._last_attached().endpoint

    @property
    def shared_memory_domain(self) -> str:
        return self._last_attached().domain

    def _last_attached(self) -> wire.Attached:
        if self._attachment is None:
            raise RuntimeError("connect() first: the sidecar tells its endpoint and domain")
        return self._attachment.attached

    async def _attached(self, deadline_s: float) -> Attachment:
        deadline = asyncio.get_running_loop().time() + deadline_s
        while True:
            attachment = self._attachment
            if attachment is not None and attachment.lost is None:
                return attachment
            if self._closed:
                raise StreamClosed("the connector client is closed")
            if self._refusal is not None:
                raise self._refusal
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"no connector sidecar at {self._path} within {deadline_s:g} s: {self._why_not}"
                ) from None

    async def _keep_attached(self) -> None:
        failures = 0
        while not self._closed:
            lost = asyncio.Event()
            try:
                attachment = await self._attach_once(lost)
            except Refusal as refusal:
                self._why_not = str(refusal)
                self._refusal = by_code(refusal.code)(f"the connector sidecar refused this engine: {refusal}")
            except (OSError, TimeoutError, ProtocolError) as error:
                self._why_not = str(error) or type(error).__name__
            else:
                failures, self._refusal = 0, None
                self._attachment = attachment
                self._changed.set()
                log.info("connector.attached", endpoint=attachment.attached.endpoint)
                await lost.wait()
                continue
            self._changed.set()
            await asyncio.sleep(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
            failures += 1

    async def _attach_once(self, lost: asyncio.Event) -> Attachment:
        cell: list[Attachment] = []

        def on_lost(reason: str) -> None:
            if cell:
                self._on_lost(cell[0], reason)
            lost.set()

        attachment = await Attachment.open(
            self._path, self._attach, _DIAL_SECONDS, lambda head, body: self._on_frame(cell[0], head, body), on_lost
        )
        cell.append(attachment)
        if lost.is_set():  # between the handshake and here
            self._on_lost(attachment, "closed at once")
        return attachment

    def _on_lost(self, attachment: Attachment, reason: str) -> None:
        attachment.end(reason)
        self._why_not = f"connection lost: {reason}"
        if self._closed:
            return
        log.warning("connector.lost", reason=reason)
        for stream in list(self._ports.values()):
            if stream.attachment is attachment:
                self._fail(stream, UpstreamLost.code, f"{stream.id[1]}: the connector sidecar is gone ({reason})")

    # --- producer

    async def put(self, request: str, edge: str, payload: Payload) -> None:
        header = payloads.describe(payload)
        if header.nbytes > min(self._limits.max_chunk_bytes, wire.MAX_CHUNK_BYTES):
            raise CapacityExceeded(
                f"chunk of {header.nbytes} bytes on {edge} of request {request};"
                f" at most {self._limits.max_chunk_bytes} are allowed"
            )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.put_deadline_s
        tx = self._tx.get((request, edge)) or self._bind(
            (request, edge), await self._attached(self._limits.put_deadline_s)
        )
        async with tx.lock:
            _check(tx)
            if tx.finished:
                raise StreamClosed(f"put on {edge} of request {request} after its finished chunk")
            sent = False
            try:
                await self._send_chunk(tx, payload, header, deadline)
                sent = True
            finally:
                if not sent and tx.error is None:  # a chunk in part, or a gap: the stream cannot go on
                    self._cancel(tx, "put was interrupted")
                    tx.error = (StreamClosed, f"{edge} of request {request}: an earlier put was interrupted")
            tx.seq += 1
            if payload.finished:
                tx.finished = True
                self._tx.pop(tx.id, None)
                self._sent.setdefault(request, {})[edge] = tx
                if len(self._sent) > _REMEMBERED:
                    self._sent.popitem(last=False)

    def _bind(self, id: StreamId, attachment: Attachment) -> _Tx:
        request, edge = id
        if request in self._over:
            raise StreamClosed(f"put on {edge}: request {request} is over in this replica")
        if edge in self._sent.get(request, ()):
            raise StreamClosed(f"put on {edge} of request {request} after its finished chunk")
        if id in self._tx:
            return self._tx[id]
        tx = _Tx(id, self._number(), attachment)
        self._tx[id] = self._ports[tx.number] = tx
        attachment.send(wire.Bind(tx.number, edge, request))
        return tx

    async def _send_chunk(self, tx: _Tx, payload: Payload, header: ChunkHeader, deadline: float) -> None:
        attachment, length = tx.attachment, header.nbytes
        limit = largest_slab(attachment.arena.length)
        if INLINE_BYTES < length <= limit:
            slab = await attachment.allocate(length, self._limits.arena_wait_s)
            if slab is not None:
                try:
                    payloads.write(payload, header, attachment.arena.view[slab.offset : slab.offset + length])
                    await self._credit(tx, deadline)
                except BaseException:
                    attachment.free_unsent(slab)
                    raise
                attachment.send(Put(tx.number, tx.seq, 0, True, length, slab, header))
                return
        flat = bytearray(length)
        payloads.write(payload, header, memoryview(flat))
        data = memoryview(flat)
        at = piece = 0
        while True:
            part, slab = min(length - at, FRAGMENT_BYTES), None
            if length > limit:
                part = min(length - at, limit)
                slab = await attachment.allocate(part, self._limits.arena_wait_s)
                if slab is not None:
                    attachment.arena.view[slab.offset : slab.offset + part] = data[at : at + part]
                else:
                    part = min(part, FRAGMENT_BYTES)
            try:
                await self._credit(tx, deadline)
                if slab is None:
                    await attachment.writable()
            except BaseException:
                if slab is not None:
                    attachment.free_unsent(slab)
                raise
            last = at + part == length
            put = Put(tx.number, tx.seq, piece, last, part, slab, header if piece == 0 else None)
            attachment.send(put, b"" if slab is not None else data[at : at + part])
            at, piece = at + part, piece + 1
            if last:
                return

    async def _credit(self, tx: _Tx, deadline: float) -> None:
        while tx.error is None and not tx.credits:
            tx.moved.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await tx.moved.wait()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"put on {tx.id[1]} of request {tx.id[0]}: the consumer granted nothing within"
                    f" {self._limits.put_deadline_s:g} s"
                ) from None
        _check(tx)
        tx.credits -= 1

    # --- consumer

    async def open(self, request: str, producer: Producer) -> None:
        id = (request, producer.edge)
        attachment = await self._attached(self._limits.put_deadline_s)
        if request in self._over or id in self._rx:
            raise StreamClosed(
                f"open of {producer.edge}: request {request} is over here, or the stream is open already"
            )
        due = asyncio.get_running_loop().time() + self._limits.chunk_deadline_s
        inbound = Inbound(self._limits.max_chunk_bytes)
        rx = _Rx(id, self._number(), attachment, inbound, producer.edge in self._withheld, due)
        self._rx[id] = self._ports[rx.number] = rx
        attachment.send(
            wire.Open(
                stream=rx.number,
                edge=producer.edge,
                request=request,
                producer=producer.replica,
                consumer=self._attach.replica,
                endpoint=producer.data_endpoint,
                domain=producer.shared_memory_domain,
                revision=self._plan.revision,
                contract_version=self._plan.contract_version,
                credits=WINDOW_PIECES,
            )
        )

    def events(self) -> AsyncIterator[EdgeEvent]:
        return _Events(self._next_event)

    async def _next_event(self) -> EdgeEvent:
        while not self._closed:
            if not self._ready:
                self._event.clear()
                await self._event.wait()
                continue
            rx = self._ready.popleft()  # one event a stream in turn: fair between requests
            if not rx.queue:
                continue
            event = rx.queue.popleft()
            if rx.queue:
                self._ready.append(rx)
            elif rx.ended:
                self._rx.pop(rx.id, None)
            if isinstance(event, ChunkReceived) and not rx.withhold:
                self._grant(rx)
            return event
        raise StopAsyncIteration

    def _grant(self, rx: _Rx) -> None:
        if not rx.ended:
            rx.attachment.send(wire.Credit(rx.number, 1))

    def _push(self, rx: _Rx, event: EdgeEvent) -> None:
        if not rx.queue:
            self._ready.append(rx)
        rx.queue.append(event)
        self._event.set()

    # --- what the sidecar says

    def _on_frame(self, attachment: Attachment, header: bytes, body: bytes) -> None:
        message = wire.decode_to_engine(header)
        match message:
            case Put():
                self._on_put(attachment, message, body)
            case wire.Credit(number, pieces):
                stream = self._ports.get(number)
                if isinstance(stream, _Tx):
                    stream.credits += pieces
                    stream.moved.set()
            case wire.Freed(slabs):
                attachment.on_freed(slabs)
            case wire.Extent():
                attachment.on_extent(message)
            case wire.Failed(number, code, text):
                stream = self._ports.get(number)
                if stream is not None:
                    self._fail(stream, code, text)
            case wire.Pong():
                attachment.on_pong()
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__}")

    def _on_put(self, attachment: Attachment, put: Put, body: bytes) -> None:
        wire.check_body(put, len(body))
        rx = self._ports.get(put.stream)
        if not isinstance(rx, _Rx) or rx.ended:
            if put.slab is not None:
                attachment.release(put.slab)  # late: the request is over here
            return
        rx.due = asyncio.get_running_loop().time() + self._limits.chunk_deadline_s
        held = put.slab
        try:
            done = rx.inbound.accept(put, body if held is None else attachment.arena.data(held))
            if done is not None:
                data, pinned = self._take(rx, done, held)
                if pinned:
                    held = None  # released with its last view
                seconds = max(0.0, time.time() - done.chunk.sent_at)
                payload = payloads.read(done.chunk, data)
                del data
                self._received(rx, ChunkReceived(*rx.id, done.seq, payload, seconds), done.chunk)
            else:
                self._grant(rx)
        except Duplicate:
            pass
        except ProtocolError as error:
            self._cancel(rx, str(error))
            self._fail(rx, ProtocolError.code, f"{rx.id[1]}: {error}")
        finally:
            if held is not None:
                attachment.release(held)

    def _take(self, rx: _Rx, done: Assembled, slab: Slab | None) -> tuple[payloads.Bytes, bool]:
        """(bytes of the chunk, whether they are still in the arena)."""
        attachment = rx.attachment
        if slab is None or not done.whole:
            return np.frombuffer(done.data, np.uint8), False
        if rx.withhold or attachment.pinned_bytes + slab.length > attachment.arena.length // _PINNED_SHARE:
            return np.frombuffer(bytes(done.data), np.uint8), False
        return attachment.view(slab), True

    def _received(self, rx: _Rx, chunk: ChunkReceived, header: ChunkHeader) -> None:
        if header.finished:
            rx.ended = True
            self._ports.pop(rx.number, None)
        if not rx.withhold:
            self._push(rx, chunk)
            return
        rx.withheld.append(chunk)
        rx.withheld_bytes += header.nbytes
        if rx.withheld_bytes > self._limits.max_withheld_bytes:
            self._cancel(rx, "too many bytes")
            text = f"{rx.id[1]}: more than {self._limits.max_withheld_bytes} bytes before the stream was finished"
            self._fail(rx, CapacityExceeded.code, text)
        elif rx.ended:
            for withheld in rx.withheld:
                self._push(rx, withheld)
            rx.withheld = []
        else:
            self._grant(rx)

    def _fail(self, stream: _Tx | _Rx, code: str, message: str) -> None:
        self._ports.pop(stream.number, None)
        if isinstance(stream, _Tx):
            if stream.error is None:
                stream.error = (by_code(code), message)
            stream.moved.set()
        else:
            stream.ended = True
            stream.withheld = []
            shown = UpstreamLost.code if code == StreamClosed.code else code
            self._push(stream, EdgeFailed(*stream.id, shown, message))

    def _cancel(self, stream: _Tx | _Rx, reason: str) -> None:
        self._ports.pop(stream.number, None)
        stream.attachment.send(wire.Cancel(stream.number, reason[:2000]))

    async def _watch_deadlines(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = loop.time()
            for rx in [r for r in self._rx.values() if now > r.due and not r.ended and not r.queue]:
                self._cancel(rx, "chunk deadline")
                text = f"{rx.id[1]}: no chunk from upstream within {self._limits.chunk_deadline_s:g} s"
                self._fail(rx, DeadlineExceeded.code, text)

    # --- ends

    async def cleanup(self, request: str) -> None:
        self._end_request(request, "cleanup", drop_finished=False)

    async def abort(self, request: str) -> None:
        self._end_request(request, "abort", drop_finished=True)

    def _end_request(self, request: str, reason: str, *, drop_finished: bool) -> None:
        self._over[request] = None
        self._over.move_to_end(request)
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        for id in [i for i in self._tx if i[0] == request]:
            tx = self._tx.pop(id)
            if tx.error is None:
                self._cancel(tx, reason)
                tx.error = (StreamClosed, f"{id[1]}: request {request} is over in this replica")
            tx.moved.set()
        for id in [i for i in self._rx if i[0] == request]:
            rx = self._rx.pop(id)
            if not rx.ended:
                self._cancel(rx, reason)
            rx.ended = True
            rx.queue.clear()
            rx.withheld = []
        for tx in self._sent.pop(request, {}).values():
            if drop_finished:
                self._cancel(tx, reason)
            else:
                self._ports.pop(tx.number, None)

    async def health(self) -> ConnectorHealth:
        attachment = self._attachment
        if attachment is None or attachment.lost is not None or not await attachment.ping(1.0):
            return ConnectorHealth(False, f"no connector sidecar: {self._why_not}", 0, 0, len(self._ports))
        used = attachment.pool.used_bytes + attachment.pinned_bytes
        return ConnectorHealth(True, "attached", attachment.arena.length, used, len(self._ports))

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        for rx in self._rx.values():
            rx.queue.clear()
            rx.withheld = []
        for tx in self._tx.values():
            tx.error = tx.error or (StreamClosed, "the connector client is closed")
            tx.moved.set()
        if self._attachment is not None:
            self._attachment.close()
        self._event.set()
        self._changed.set()

    def _number(self) -> int:
        self._numbers = self._numbers % 0xFFFFFFFF + 1
        return self._numbers
