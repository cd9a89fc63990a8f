"""One attached engine, as the sidecar sees it: what it says goes to the hub, what it is told is gathered here."""

from __future__ import annotations

import asyncio
import time

from omni_runtime.connectors import wire
from omni_runtime.connectors.hub import Hub
from omni_runtime.connectors.ipc import FrameChannel, Line
from omni_runtime.connectors.streams import Key, Piece, Port
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.connectors.wire import Put, Slab


def accept(hub: Hub, attach: wire.Attach) -> EngineSession | wire.Rejected:
    """An engine asks to attach."""
    refusal = hub.refusal(attach)
    if refusal is not None:
        return refusal
    engine = EngineSession(hub, hub.new_session(), attach)
    hub.attach(engine)
    return engine


class EngineSession:
    """One attached engine."""

    def __init__(self, hub: Hub, session: int, attach: wire.Attach) -> None:
        self.session = session
        self.stage = attach.stage
        self.replica = attach.replica
        self.near = attach.near
        self.channel: FrameChannel | None = None
        self.line = Line()
        self.attached = wire.Attached(session, hub.arena.length, hub.endpoint, hub.domain)
        self._hub = hub
        self._freed: list[Slab] = []
        self._granted: dict[int, int] = {}

    def send(self, message: wire._Message, body: bytes | memoryview = b"") -> None:
        if self.channel is not None:
            self.channel.send(message, body)

    def deliver(self, stream: int, put: Put, body: bytes | memoryview) -> None:
        self.send(Put(stream, put.seq, put.piece, put.last, put.length, put.slab, put.chunk), body)

    def freed(self, slab: Slab) -> None:
        """Told once per turn of the loop, as credits are."""
        self._want_flush()
        self._freed.append(slab)

    def grant(self, stream: int, pieces: int) -> None:
        self._want_flush()
        self._granted[stream] = self._granted.get(stream, 0) + pieces

    def _want_flush(self) -> None:
        if not self._freed and not self._granted:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        granted, self._granted = self._granted, {}
        for stream, pieces in granted.items():
            self.send(wire.Credit(stream, pieces))
        slabs, self._freed = self._freed, []
        for at in range(0, len(slabs), 512):
            self.send(wire.Freed(tuple(slabs[at : at + 512])))

    def on_lost(self, reason: str) -> None:
        self.channel = None
        self._hub.engine_lost(self, reason)

    def on_frame(self, header: bytes, body: bytes) -> None:
        hub = self._hub
        message = wire.decode_from_engine(header)
        if body and not isinstance(message, Put):
            raise ProtocolError(f"{type(message).__name__} has no body")
        match message:
            case Put():
                self._put(message, body)
            case wire.Credit(stream, pieces):
                port = Port(self.session, stream)
                if hub.remote is None or not hub.remote.credit(port, pieces):
                    hub.apply(hub.table.credit(port, pieces, time.monotonic()))
            case wire.Bypassed(stream, chunks, starved):
                port = Port(self.session, stream)
                hub.apply(hub.table.bypassed(port, chunks, time.monotonic(), starved=starved))
            case wire.Taken(stream, pieces):
                port = Port(self.session, stream)
                if hub.remote is None or not hub.remote.taken(port, pieces):
                    hub.apply(hub.table.taken(port, pieces, time.monotonic()))
            case wire.Received(edge, producer, seconds):
                hub.received(edge, producer, self.replica, seconds)
            case wire.Release(slabs):
                for slab in slabs:
                    hub.free(slab, self.session)
            case wire.Bind(stream, edge, request):
                port = Port(self.session, stream)
                hub.apply(hub.table.bind(port, Key(self.replica, edge, request), time.monotonic()))
                hub.pair(port)
            case wire.Open():
                self._open(message)
            case wire.Cancel(stream, reason):
                port = Port(self.session, stream)
                if hub.remote is None or not hub.remote.cancel(port, reason):
                    hub.apply(hub.table.cancel(port, reason))
            case wire.Lease(length):
                self.send(hub.lease(self.session, length))
            case wire.Return(offset):
                hub.give_back(self.session, offset)
            case wire.Ping():
                self.send(wire.Pong())
            case wire.Attach() | wire.Claim():
                raise ProtocolError("Attach comes once, and Claim on its own")

    def _put(self, put: Put, body: bytes) -> None:
        hub = self._hub
        wire.check_body(put, len(body))
        if put.slab is not None:
            if not hub.holds(self.session, put.slab):
                raise ProtocolError("slab is not in an extent of this engine")
            hub.arena.data(put.slab)  # the generation must match now; later changes are caught by the reader
            hub.ledger.enter(put.slab, self.session)
        elif put.length > wire.INLINE_BYTES:
            hub.metrics.spilled.inc()
        before = hub.table.late_pieces
        hub.apply(hub.table.put(Port(self.session, put.stream), Piece(put, body), time.monotonic()))
        if hub.table.late_pieces > before:
            hub.metrics.late.inc(hub.table.late_pieces - before)

    def _open(self, message: wire.Open) -> None:
        hub = self._hub
        port = Port(self.session, message.stream)
        refusal = hub.mismatch(message.revision, message.contract_version)
        if refusal is not None:
            hub.fail(port, "ContractMismatch", f"{message.edge}: {refusal}")
        elif message.domain == hub.domain:
            key = Key(message.producer, message.edge, message.request)
            opened = hub.table.open(port, key, self.replica, message.credits, time.monotonic(), message.token)
            hub.apply(opened)
            hub.pair(port)
        elif hub.remote is not None:
            hub.remote.open(port, message)
        else:
            hub.fail(port, "UpstreamLost", f"{message.edge}: {message.endpoint} is in another pod")
