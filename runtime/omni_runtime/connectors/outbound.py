"""Bytes to other sidecars: the listener that consumers' sidecars dial, and the fair sender of each.

A piece goes out in fragments. Streams take turns, a fragment each, and each has a window of unacknowledged
fragments; so one huge payload neither delays the others nor piles up in a slow peer's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import zmq
import zmq.asyncio

from omni_runtime.connectors import wire
from omni_runtime.connectors.hub import Hub
from omni_runtime.connectors.streams import Deliver, Key, Port
from omni_runtime.connectors.wire import FRAGMENT_BYTES, WINDOW_FRAGMENTS, ProtocolError, Put
from omni_runtime.logs import get_logger
from omni_runtime.protocol.channels import Channels, bound_port

log = get_logger(__name__)

PING_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 20.0  # a peer from which nothing came for so long is gone; a busy node may stall for seconds
MAX_PEERS: Final = 1024
MAX_MESSAGE_BYTES: Final = wire.MAX_BODY_BYTES
_BURST = 16  # fragments in one turn of the loop


@dataclass(slots=True)
class _Outgoing:
    """One stream to a peer."""

    stream: int
    queue: deque[Deliver] = field(default_factory=deque)
    sent: int = 0  # bytes of the first queued piece
    unacknowledged: int = 0
    ready: bool = False
    finishing: bool = False  # the chunk on its way is the last one
    finished: bool = False  # and its last byte has been sent


class PeerSession:
    """A consumer's sidecar."""

    def __init__(self, hub: Hub, listener: PeerListener, identity: bytes) -> None:
        self.session = hub.new_session()
        self.identity = identity
        self.heard = time.monotonic()
        self._hub = hub
        self._listener = listener
        self._streams: dict[int, _Outgoing] = {}
        self._ready: deque[_Outgoing] = deque()
        self._scheduled = False

    # --- from the stream table

    def deliver(self, deliver: Deliver) -> None:
        number = deliver.consumer.stream
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = _Outgoing(number)
        stream.queue.append(deliver)
        self._make_ready(stream)

    def fail(self, stream: int, code: str, message: str) -> None:
        self._forget(stream)
        self._listener.send(self, wire.Failed(stream, code, message))

    @property
    def idle(self) -> bool:
        """Everything that was sent has been stored at the other side."""
        return not any(s.queue or s.unacknowledged for s in self._streams.values())

    # --- from the peer

    def on_message(self, message: wire.FromConsumerSidecar) -> None:
        self.heard = now = time.monotonic()
        hub = self._hub
        match message:
            case wire.Acknowledge(number, fragments):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.unacknowledged = max(0, stream.unacknowledged - fragments)
                    if stream.finished and not stream.unacknowledged:
                        self._forget(number)
                    else:
                        self._make_ready(stream)
            case wire.Credit(number, pieces):
                hub.apply(hub.table.credit(Port(self.session, number), pieces, now))
            case wire.Open():
                refusal = hub.mismatch(message.revision, message.contract_version)
                if refusal is not None:
                    hub.metrics.refused.labels("contract").inc()
                    self.fail(message.stream, "ContractMismatch", f"{message.edge}: {refusal}")
                    return
                key = Key(message.producer, message.edge, message.request)
                port = Port(self.session, message.stream)
                hub.apply(hub.table.open(port, key, message.consumer, message.credits, now))
            case wire.Cancel(number, reason):
                self._forget(number)
                hub.apply(hub.table.cancel(Port(self.session, number), reason))
            case wire.Ping():
                self._listener.send(self, wire.Pong(self.session))

    def lost(self, reason: str) -> None:
        for number in list(self._streams):
            self._forget(number)
        self._hub.session_lost(self.session, reason)

    # --- sending

    def _forget(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            for deliver in stream.queue:
                self._release(deliver.piece.put)
            stream.queue.clear()

    def _release(self, put: Put) -> None:
        if put.slab is not None:
            self._hub.free(put.slab, self.session)

    def _make_ready(self, stream: _Outgoing) -> None:
        if stream.queue and not stream.ready and stream.unacknowledged < WINDOW_FRAGMENTS:
            stream.ready = True
            self._ready.append(stream)
        if self._ready and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Send up to a burst of fragments, one a stream in turn, then let the rest of the process run."""
        self._scheduled = False
        for _ in range(_BURST):
            if not self._ready:
                return
            stream = self._ready.popleft()
            stream.ready = False
            if stream.queue and self._streams.get(stream.stream) is stream:
                if not self._send_fragment(stream):
                    return
                self._make_ready(stream)
        if self._ready and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _send_fragment(self, stream: _Outgoing) -> bool:
        """False if the peer is gone."""
        deliver = stream.queue[0]
        put = deliver.piece.put
        data = self._hub.arena.data(put.slab) if put.slab is not None else memoryview(deliver.piece.body)
        part = data[stream.sent : stream.sent + FRAGMENT_BYTES]
        if stream.sent == 0:
            message: wire._Message = Put(stream.stream, put.seq, put.piece, put.last, put.length, None, put.chunk)
        else:
            message = wire.Fragment(stream.stream, stream.sent)
        stream.sent += len(part)
        stream.unacknowledged += 1
        if put.chunk is not None:
            stream.finishing = put.chunk.finished
        done = stream.sent >= put.length
        if done:
            stream.finished = stream.finishing and put.last
            stream.queue.popleft()
            stream.sent = 0
        if not self._listener.send(self, message, part):
            return False
        if done:
            if put.last and put.chunk is not None:
                metrics = self._hub.metrics
                edge = metrics.of(metrics.edge(deliver.key.edge, deliver.key.producer, deliver.to), "TCP")
                edge.tx.observe(max(0.0, time.time() - put.chunk.sent_at))
            self._release(put)
        return True


class PeerListener:
    """ROUTER with CURVE on the data port. Only holders of the pipeline's client key get as far as a message."""

    def __init__(self, hub: Hub, channels: Channels) -> None:
        self._hub = hub
        self._channels = channels
        self._socket: zmq.asyncio.Socket | None = None
        self._peers: dict[bytes, PeerSession] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, endpoint: str) -> int:
        """Returns the port."""
        self._socket = self._channels.serve(zmq.ROUTER, endpoint, max_message_bytes=MAX_MESSAGE_BYTES)
        self._task = asyncio.get_running_loop().create_task(self._receive(self._socket))
        return bound_port(self._socket)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                self._on_frames(frames)
            except ProtocolError as error:
                self._hub.metrics.refused.labels("protocol").inc()
                log.warning("peer.protocol_error", reason=str(error))
                self._drop(frames[0], str(error))

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise ProtocolError(f"{len(frames) - 1} frames; a consumer's message is one")
        identity, header = frames
        message = wire.decode_from_consumer(header)
        peer = self._peers.get(identity)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                raise ProtocolError(f"more than {MAX_PEERS} peers")
            peer = self._peers[identity] = PeerSession(self._hub, self, identity)
            self._hub.consumers[peer.session] = peer
        peer.on_message(message)

    def send(self, peer: PeerSession, message: wire._Message, body: memoryview | bytes = b"") -> bool:
        """False if the peer is gone, which ends its streams. Windows bound what can wait in the socket."""
        assert self._socket is not None
        parts = [peer.identity, wire.encode(message), body] if len(body) else [peer.identity, wire.encode(message)]
        sent: asyncio.Future[object] = asyncio.ensure_future(self._socket.send_multipart(parts))
        if sent.done() and not sent.cancelled() and sent.exception() is not None:
            reason = f"connection to the consumer's sidecar is gone: {sent.exception()}"
            asyncio.get_running_loop().call_soon(self._drop, peer.identity, reason)
            return False
        sent.add_done_callback(_ignore_outcome)  # a peer that goes later is noticed by its silence
        return True

    def _drop(self, identity: bytes, reason: str) -> None:
        peer = self._peers.pop(identity, None)
        if peer is not None:
            self._hub.consumers.pop(peer.session, None)
            peer.lost(reason)

    @property
    def idle(self) -> bool:
        return all(peer.idle for peer in self._peers.values())

    def tick(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if now - peer.heard > SILENCE_SECONDS:
                self._drop(peer.identity, f"nothing heard from the consumer's sidecar for {SILENCE_SECONDS:g} s")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


def _ignore_outcome(future: asyncio.Future[object]) -> None:
    if not future.cancelled():
        future.exception()
