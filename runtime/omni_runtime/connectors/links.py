"""Streams that engines of this pod have opened at other sidecars: one link per sidecar, slabs for what comes in.

Bytes go straight into the arena and the engine gets a descriptor, as within a pod. While the arena is full the
stream is not acknowledged, so its producer stops; after a while its pieces go to the engine inline instead.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from omni_runtime.connectors import wire
from omni_runtime.connectors.hub import Hub
from omni_runtime.connectors.ledger import QUEUE
from omni_runtime.connectors.outbound import MAX_PEERS
from omni_runtime.connectors.peer_link import Incoming, PeerLink, parse_address
from omni_runtime.connectors.secure import Sealed, as_bytes, copy_into
from omni_runtime.connectors.streams import Port
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.connectors.wire import FRAGMENT_BYTES, INLINE_BYTES, Put, Slab
from omni_runtime.logs import get_logger
from omni_runtime.protocol.channels import CurveKeys

log = get_logger(__name__)

ACKNOWLEDGE_FRAGMENTS: Final = wire.WINDOW_FRAGMENTS // 2  # at once, so that half a window is always under way
SPILL_SECONDS: Final = 1.0  # wait for room in the arena before a piece goes inline


class PeerLinks:
    """All links of a sidecar; implements hub.RemoteStreams."""

    def __init__(self, hub: Hub, keys: CurveKeys) -> None:
        self.hub = hub
        self.keys = keys
        self._links: dict[str, PeerLink] = {}
        self._streams: dict[Port, Incoming] = {}
        self._starved: set[Port] = set()
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._streams)

    # --- from engines

    def open(self, port: Port, message: wire.Open) -> None:
        address = parse_address(message.endpoint)
        if address is None:
            self.hub.fail(port, "ProtocolError", f"{message.edge}: {message.endpoint!r} is not tcp://host:port")
            return
        if port in self._streams:
            self.hub.fail(port, "ProtocolError", f"stream number {port.stream} is in use")
            return
        link = self._links.get(message.endpoint)
        if link is None:
            if len(self._links) >= MAX_PEERS:
                self.hub.fail(port, "CapacityExceeded", f"more than {MAX_PEERS} links to other pods")
                return
            link = self._links[message.endpoint] = PeerLink(self, message.endpoint, *address)
        self._numbers = self._numbers % 0xFFFFFFFF + 1
        stream = Incoming(port, message, link)
        self._streams[port] = stream
        link.open(self._numbers, stream)

    def credit(self, port: Port, pieces: int) -> bool:
        stream = self._streams.get(port)
        if stream is None:
            return False
        swallowed = min(pieces, stream.surplus)
        stream.surplus -= swallowed
        if pieces > swallowed:
            stream.link.send_for(stream, lambda number: wire.Credit(number, pieces - swallowed))
        return True

    def taken(self, port: Port, pieces: int) -> bool:
        stream = self._streams.get(port)
        if stream is None:
            return False
        stream.link.send_for(stream, lambda number: wire.Taken(number, pieces))
        return True

    def cancel(self, port: Port, reason: str) -> bool:
        stream = self._streams.get(port)
        if stream is None:
            return False
        stream.link.send_for(stream, lambda number: wire.Cancel(number, reason))
        self.forget(stream)
        return True

    def session_lost(self, session: int) -> None:
        for port in [p for p in self._streams if p.session == session]:
            self.cancel(port, "consumer engine is gone")

    def room(self) -> None:
        if self._starved:
            asyncio.get_running_loop().call_soon(self.feed_starved)

    # --- from links

    def bound(self, stream: Incoming, producer: int) -> None:
        """The engine that the stream comes from is known: have a line to it."""
        lines, link = self.hub.far_lines, stream.link
        if lines is not None and stream.opened.token:
            key = stream.port.session, link.endpoint, producer
            lines.to(
                key, link.address, lambda name: stream.link.send_for(stream, lambda number: wire.Lay(number, name))
            )

    def fail(self, stream: Incoming, code: str, message: str) -> None:
        self.forget(stream)
        self.hub.fail(stream.port, code, message)

    def forget(self, stream: Incoming) -> None:
        self._streams.pop(stream.port, None)
        self._starved.discard(stream.port)
        stream.link.forget(stream)
        stream.waiting.clear()
        if stream.slab is not None:
            self.hub.free(stream.slab, QUEUE)
            stream.slab = None

    def drop_link(self, link: PeerLink, streams: list[Incoming], reason: str) -> None:
        if self._links.get(link.endpoint) is link:
            del self._links[link.endpoint]
            if self.hub.far_lines is not None:
                self.hub.far_lines.link_lost(link.endpoint)
        for stream in streams:
            self.fail(stream, "UpstreamLost", f"{stream.opened.edge}: {reason}")

    def accept(self, stream: Incoming, message: Put | wire.Fragment, body: Sealed) -> None:
        """One fragment. Raises ProtocolError if it is not the next one."""
        if stream.fetching:
            raise ProtocolError("bytes of a stream whose last piece is still being fetched")
        if stream.waiting:
            if len(stream.waiting) >= wire.WINDOW_FRAGMENTS:
                raise ProtocolError("producer's sidecar ignored its window")
            stream.waiting.append((message, body.open()))
        elif not self._store(stream, message, body):
            stream.waiting.append((message, body.open()))
            stream.waiting_since = time.monotonic()
            self._starved.add(stream.port)

    def fetch(self, stream: Incoming, message: wire.Remote) -> None:
        """A piece that this sidecar reads out of the producer's arena. Every Remote is answered, whatever happens."""
        put, link, mooncake = message.put, stream.link, self.hub.mooncake
        if stream.put is not None or stream.waiting or stream.fetching or put.slab is not None or mooncake is None:
            raise ProtocolError("a piece to be fetched, out of turn")
        slab = self.hub.allocate(put.length)
        if slab is None:  # as fragments it can wait, and spill
            link.answer(message.stream, done=False, later=True, reason="no room in the arena")
            return
        stream.fetching, stream.began = True, time.monotonic()
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(mooncake.threads, mooncake.fetch, message.segments, message.address, slab)
        running.add_done_callback(lambda future: self._fetched(stream, message, slab, future))

    def _fetched(self, stream: Incoming, message: wire.Remote, slab: Slab, future: asyncio.Future[bool]) -> None:
        error = None if future.cancelled() else future.exception()
        done = not future.cancelled() and error is None and future.result()
        stream.fetching = False
        wanted = self._streams.get(stream.port) is stream
        if not done or not wanted:
            self.hub.free(slab, QUEUE)
        if not done:
            self.hub.metrics.fallbacks.labels("fetch").inc()
            log.warning("mooncake.fetch_failed", segments=message.segments, reason=str(error or "see the engine's log"))
        stream.link.answer(message.stream, done=done, later=done, reason="" if done else "the fetch failed")
        if done:
            self.hub.metrics.fetched.inc(slab.length)
        if done and wanted:
            stream.put, stream.slab, stream.got = message.put, slab, message.put.length
            self._hand_over(stream, message.put, b"", whole=True)

    def feed_starved(self) -> None:
        now = time.monotonic()
        for port in list(self._starved):
            stream = self._streams.get(port)
            if stream is None:
                continue
            if not stream.spilling and now - stream.waiting_since > SPILL_SECONDS:
                stream.spilling = True
                self.hub.metrics.spilled.inc()
            try:
                while stream.waiting and self._store(stream, *stream.waiting[0]):
                    stream.waiting_since = now
                    if stream.waiting:  # else it was the stream's last piece
                        stream.waiting.popleft()
            except ProtocolError as error:
                stream.link.broken(stream, error)
                continue
            if not stream.waiting:
                self._starved.discard(port)

    def _store(self, stream: Incoming, message: Put | wire.Fragment, body: Sealed | bytes) -> bool:
        """Put a fragment where it belongs; False if there is no room yet."""
        if isinstance(message, Put):
            if stream.put is not None:
                raise ProtocolError("a piece began before the last one ended")
            if len(body) != min(message.length, FRAGMENT_BYTES):
                raise ProtocolError(f"first fragment has {len(body)} bytes of a piece of {message.length}")
            if message.length > INLINE_BYTES and not stream.spilling:
                stream.slab = self.hub.allocate(message.length)
                if stream.slab is None:
                    return False
            stream.put, stream.got, stream.began = message, 0, time.monotonic()
        elif stream.put is None or message.offset != stream.got or not len(body):
            raise ProtocolError(f"fragment at {message.offset}, expected {stream.got}")
        put = stream.put
        end = stream.got + len(body)
        if end > put.length:
            raise ProtocolError(f"piece of {put.length} bytes got {end}")
        if stream.slab is not None:
            copy_into(body, self.hub.arena.data(stream.slab)[stream.got : end])
        stream.got = end
        stream.unacknowledged += 1
        number = stream.link.number(stream)  # the last piece ends the stream, and is acknowledged all the same
        self._hand_over(stream, put, body, whole=end == put.length)
        due = end == put.length and (put.length > INLINE_BYTES or (put.last and stream.finishing))
        if number is not None and (due or stream.unacknowledged >= ACKNOWLEDGE_FRAGMENTS):
            stream.link.acknowledge(number, stream.unacknowledged)
            stream.unacknowledged = 0
        return True

    def _hand_over(self, stream: Incoming, put: Put, body: Sealed | bytes, *, whole: bool) -> None:
        """Give the engine the finished slab, or the fragment itself when there is none."""
        engine = self.hub.engines.get(stream.port.session)
        if engine is None or (stream.slab is not None and not whole):
            return
        if put.seq != stream.seq:
            stream.seq, stream.pieces_out = put.seq, 0
        chunk = put.chunk if stream.pieces_out == 0 else None
        number, last = stream.pieces_out, put.last and whole
        stream.pieces_out += 1
        slab, stream.slab = stream.slab, None
        if slab is not None:
            self.hub.ledger.deliver(slab, stream.port.session)
            engine.deliver(stream.port.stream, Put(0, put.seq, number, last, put.length, slab, chunk), b"")
        else:
            engine.deliver(stream.port.stream, Put(0, put.seq, number, last, len(body), None, chunk), as_bytes(body))
            if not whole:
                stream.surplus += 1
        if whole:
            stream.put, stream.spilling = None, False
        if put.chunk is not None:
            stream.finishing = put.chunk.finished
        if last:
            self._observe(stream, put)
            if stream.finishing:
                self.forget(stream)

    def _observe(self, stream: Incoming, put: Put) -> None:
        metrics, opened = self.hub.metrics, stream.opened
        edge = metrics.of(metrics.edge(opened.edge, opened.producer, opened.consumer), "TCP")
        edge.rx.observe(time.monotonic() - stream.began)
        if put.chunk is not None:
            edge.in_flight.observe(max(0.0, time.time() - put.chunk.sent_at))

    def tick(self) -> None:
        self.feed_starved()
        for link in list(self._links.values()):
            link.tick()

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close("this sidecar stops")
