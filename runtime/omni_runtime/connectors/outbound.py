"""Bytes to other sidecars: the listener that consumers' sidecars dial, and the fair sender of each.

A piece goes out in fragments. Streams take turns, a fragment each, and each has a window of unacknowledged
fragments; so one huge payload neither delays the others nor piles up in a slow peer's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from omni_runtime.connectors import secure, wire
from omni_runtime.connectors.handshake import LINE, HandshakeRefused, Secrets
from omni_runtime.connectors.hub import Hub
from omni_runtime.connectors.mooncake import FETCH_BYTES
from omni_runtime.connectors.secure import Sealed, SecureChannel
from omni_runtime.connectors.streams import Deliver, Key, Port
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.connectors.wire import FRAGMENT_BYTES, INLINE_BYTES, WINDOW_FRAGMENTS, Put, Slab
from omni_runtime.logs import get_logger
from omni_runtime.protocol.channels import CurveKeys

log = get_logger(__name__)

PING_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 20.0  # a peer from which nothing came for so long is gone; a busy node may stall for seconds
MAX_PEERS: Final = 1024
MAX_HANDSHAKES: Final = 256  # at once; a stranger costs a socket for a few seconds and no more
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
    fetches: bool = False  # large pieces are fetched by the consumer's sidecar (Mooncake)
    lent: bool = False  # the first queued piece is being fetched; nothing else is sent


class PeerSession:
    """A consumer's sidecar."""

    def __init__(self, hub: Hub, listener: PeerListener, sock: socket.socket, secrets: Secrets) -> None:
        self.session = hub.new_session()
        self.channel = SecureChannel(sock, secrets, self._on_frame, self._on_lost)
        self.channel.on_room = self._schedule
        self._hub = hub
        self._listener = listener
        self._streams: dict[int, _Outgoing] = {}
        self._ready: deque[_Outgoing] = deque()
        self._scheduled = False
        self._fetchers: set[int] = set()  # streams whose consumer can fetch
        self._lent: dict[int, Put] = {}  # of streams that ended here: the other side may still read

    # --- from the stream table

    def deliver(self, deliver: Deliver) -> None:
        number = deliver.consumer.stream
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = _Outgoing(number, fetches=number in self._fetchers)
        stream.queue.append(deliver)
        if self._idle(stream) and deliver.piece.put.length <= INLINE_BYTES:
            self._send_fragment(stream)  # nobody is kept waiting by it; a turn of the loop later it would come later
        else:
            self._make_ready(stream)

    def _idle(self, stream: _Outgoing) -> bool:
        """No fragment waits here, except for the one that this stream has just got."""
        return (
            not self._ready
            and len(stream.queue) == 1
            and not stream.lent
            and stream.unacknowledged < WINDOW_FRAGMENTS
            and self.channel.room
        )

    def fail(self, stream: int, code: str, message: str) -> None:
        self._forget(stream)
        self.channel.send(wire.Failed(stream, code, message))

    def bound(self, stream: int, producer: int) -> None:
        self.channel.send(wire.Bound(stream, producer))

    @property
    def idle(self) -> bool:
        """Everything that was sent has been stored at the other side."""
        return not self._lent and not any(s.queue or s.unacknowledged for s in self._streams.values())

    def connector(self, stream: int) -> str:
        return "Mooncake" if stream in self._fetchers else "TCP"

    # --- from the peer

    def _on_frame(self, header: bytes, body: Sealed) -> None:
        if len(body):
            raise ProtocolError("a consumer's message has no body")
        message = wire.decode_from_consumer(header)
        hub, now = self._hub, time.monotonic()
        match message:
            case wire.Acknowledge(number, fragments):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.unacknowledged = max(0, stream.unacknowledged - fragments)
                    if stream.finished and not stream.unacknowledged:
                        self._forget(number)
                    else:
                        self._make_ready(stream)
            case wire.Fetched():
                self._on_fetched(message)
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
                if message.fetches and hub.can_fetch(message.edge):
                    self._fetchers.add(message.stream)
                hub.apply(hub.table.open(port, key, message.consumer, message.credits, now, message.token))
                hub.pair(port)
            case wire.Lay(number, name):
                hub.lay(Port(self.session, number), name)
            case wire.Taken(number, pieces):
                hub.apply(hub.table.taken(Port(self.session, number), pieces, now))
            case wire.Cancel(number, reason):
                self._forget(number)
                hub.apply(hub.table.cancel(Port(self.session, number), reason))
            case wire.Ping():
                self.channel.send(wire.Pong(self.session))

    def _on_lost(self, reason: str) -> None:
        self._listener.forget(self)
        for number in list(self._streams):
            self._forget(number)
        for put in self._lent.values():
            self._release(put)
        self._lent.clear()
        self._hub.session_lost(self.session, reason)

    # --- sending

    def _forget(self, number: int) -> None:
        self._fetchers.discard(number)
        stream = self._streams.pop(number, None)
        if stream is not None:
            if stream.lent:
                self._lent[number] = stream.queue.popleft().piece.put
            for deliver in stream.queue:
                self._release(deliver.piece.put)
            stream.queue.clear()

    def _release(self, put: Put) -> None:
        if put.slab is not None:
            self._hub.free(put.slab, self.session)

    def _make_ready(self, stream: _Outgoing) -> None:
        if stream.queue and not stream.ready and not stream.lent and stream.unacknowledged < WINDOW_FRAGMENTS:
            stream.ready = True
            self._ready.append(stream)
        self._schedule()

    def _schedule(self) -> None:
        if self._ready and not self._scheduled and self.channel.room:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Send up to a burst of fragments, one a stream in turn, then let the rest of the process run."""
        self._scheduled = False
        for _ in range(_BURST):
            if not self._ready or not self.channel.room:
                return
            stream = self._ready.popleft()
            stream.ready = False
            if stream.queue and self._streams.get(stream.stream) is stream:
                self._send_fragment(stream)
                self._make_ready(stream)
        self._schedule()

    def _send_fragment(self, stream: _Outgoing) -> None:
        deliver = stream.queue[0]
        put = deliver.piece.put
        if stream.sent == 0 and stream.fetches and put.slab is not None and put.length >= FETCH_BYTES:
            self._lend(stream, put, put.slab)
            return
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
        self.channel.send(message, part)
        if done:
            self._sent(deliver)

    def _sent(self, deliver: Deliver) -> None:
        put, metrics = deliver.piece.put, self._hub.metrics
        if put.last and put.chunk is not None:
            edge = metrics.of(
                metrics.edge(deliver.key.edge, deliver.key.producer, deliver.to),
                self.connector(deliver.consumer.stream),
            )
            edge.tx.observe(max(0.0, time.time() - put.chunk.sent_at))
        self._release(put)

    # --- pieces that the other side fetches

    def _lend(self, stream: _Outgoing, put: Put, slab: Slab) -> None:
        mooncake = self._hub.mooncake
        assert mooncake is not None
        stream.lent = True
        stream.unacknowledged += 1
        if put.chunk is not None:
            stream.finishing = put.chunk.finished
        shown = Put(stream.stream, put.seq, put.piece, put.last, put.length, None, put.chunk)
        self.channel.send(wire.Remote(stream.stream, shown, mooncake.segments, mooncake.address + slab.offset))

    def _on_fetched(self, message: wire.Fetched) -> None:
        kept = self._lent.pop(message.stream, None)
        if kept is not None:
            self._release(kept)
            return
        stream = self._streams.get(message.stream)
        if stream is None or not stream.lent:
            raise ProtocolError("Fetched without Remote")
        stream.lent = False
        stream.unacknowledged -= 1
        if not message.later:
            stream.fetches = False
            self._hub.metrics.fallbacks.labels("fetch").inc()
            log.warning("mooncake.fallback", stream=message.stream, reason=message.reason)
        if message.done:
            deliver = stream.queue.popleft()
            put = deliver.piece.put
            self._sent(deliver)
            if stream.finishing and put.last:
                self._forget(message.stream)
                return
        elif message.later:
            stream.fetches, again = False, stream.fetches
            stream.ready = True
            self._send_fragment(stream)  # its first fragment goes over the link, and so does the rest
            stream.ready, stream.fetches = False, again
        self._make_ready(stream)


class PeerListener:
    """The data port. Only holders of the pipeline's client key get as far as a message."""

    def __init__(self, hub: Hub, keys: CurveKeys) -> None:
        self._hub = hub
        self._keys = keys
        self._socket: socket.socket | None = None
        self._peers: set[PeerSession] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, host: str, port: int) -> int:
        """Returns the port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=1024)
        self._socket.setblocking(False)
        self._spawn(self._serve(self._socket))
        bound: int = self._socket.getsockname()[1]
        return bound

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors left: those of strangers come back within seconds
                self._hub.metrics.refused.labels("descriptors").inc()
                log.warning("peer.accept_failed", reason=str(error))
                await asyncio.sleep(0.2)
                continue
            if len(self._tasks) > MAX_HANDSHAKES or len(self._peers) >= MAX_PEERS:
                self._hub.metrics.refused.labels("connections").inc()
                sock.close()
            else:
                self._spawn(self._handshake(sock))

    async def _handshake(self, sock: socket.socket) -> None:
        try:
            secrets, purpose = await secure.accept(sock, self._keys)
            if purpose == LINE:
                await self._accept_line(sock, secrets)
                return
        except (OSError, TimeoutError, HandshakeRefused, ProtocolError) as error:
            sock.close()
            if isinstance(error, HandshakeRefused | ProtocolError):
                log.warning("peer.refused", reason=str(error))
            self._hub.metrics.refused.labels("handshake").inc()
        except asyncio.CancelledError:
            sock.close()
            raise
        else:
            peer = PeerSession(self._hub, self, sock, secrets)
            self._peers.add(peer)
            self._hub.consumers[peer.session] = peer
            peer.channel.start()

    async def _accept_line(self, sock: socket.socket, secrets: Secrets) -> None:
        """Raises OSError, TimeoutError or ProtocolError."""
        if self._hub.far_lines is None:
            raise ProtocolError("no lines are made here")
        await self._hub.far_lines.accept(sock, secrets)

    def forget(self, peer: PeerSession) -> None:
        self._peers.discard(peer)
        self._hub.consumers.pop(peer.session, None)

    @property
    def idle(self) -> bool:
        return all(peer.idle for peer in self._peers)

    def tick(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers):
            peer.channel.tick(now)
            if now - peer.channel.heard > SILENCE_SECONDS:
                peer.channel.close(f"nothing heard from the consumer's sidecar for {SILENCE_SECONDS:g} s")

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._socket is not None:
            self._socket.close()
        for peer in list(self._peers):
            peer.channel.close("this sidecar stops")
        await asyncio.sleep(0)  # they are told before the arena goes
