"""The producer's side of edge streams, as a sans-io machine: events in, actions out. Sockets and slabs live elsewhere.

One stream is one (producer replica, edge, request). It has at most one producer and one consumer, which may come in
either order; pieces wait in a bounded queue until the consumer has credit. Every event is accepted in every state:
one that is too late or unknown frees its slab and does nothing else (R4). A stream ends exactly once: delivered,
cancelled, lost or expired; its key is then remembered for a while, so that nothing late can bring it back.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from omni_runtime.connectors.wire import WINDOW_PIECES, Put, kept_back

# Structs and not dataclasses: several are made, hashed and compared for every chunk, and msgspec does that in C. No
# cycle can go through them, so that the collector need not look.


class Key(msgspec.Struct, frozen=True, gc=False):
    producer: str  # replica
    edge: str
    request: str


class Port(msgspec.Struct, frozen=True, gc=False):
    """One end of a stream as the other side numbers it."""

    session: int
    stream: int


class Piece(msgspec.Struct, frozen=True, eq=False, gc=False):
    put: Put
    body: bytes  # empty when the bytes are in the arena


# --- actions


class Deliver(msgspec.Struct, frozen=True, gc=False):
    consumer: Port
    key: Key
    to: str  # consumer replica
    piece: Piece


class Grant(msgspec.Struct, frozen=True, gc=False):
    producer: Port
    pieces: int


class Fail(msgspec.Struct, frozen=True, gc=False):
    port: Port
    code: str
    message: str


class Drop(msgspec.Struct, frozen=True, gc=False):
    """The piece will not be delivered: free its slab."""

    piece: Piece


class Count(msgspec.Struct, frozen=True, gc=False):
    """Chunks (bytes, seconds from put until sent) that went past the sidecar, from engine to engine."""

    consumer: Port
    key: Key
    to: str
    chunks: tuple[tuple[int, float], ...]


Action = Deliver | Grant | Fail | Drop | Count


@dataclass(frozen=True, slots=True)
class Limits:
    streams_per_session: int = 16_384
    remembered: int = 32_768  # ended streams
    lease_seconds: float = 300.0  # a stream on which nothing moves for so long is an orphan


@dataclass(slots=True)
class _Stream:
    key: Key
    touched: float
    producer: Port | None = None
    consumer: Port | None = None
    to: str = ""
    token: int = 0  # what the consumer calls it on its line; 0: it has none
    queue: deque[Piece] = field(default_factory=deque)
    credits: int = 0
    starved: bool = False  # the producer has chunks on the line, and no credit left
    seq: int = 0  # expected next
    piece: int = 0
    closing: bool = False  # the chunk that is coming in is the last one
    complete: bool = False  # the last piece of the finished chunk has been put


def _kept(piece: Piece) -> int:
    """Credits that it may not use up."""
    return kept_back(piece.put.length)


class _Ended:
    """Why streams have ended, by key: the last `remembered`, and at most twice as many.

    Of a key only its hash is kept (64 bits under a secret of the process), and a reason once for all whose it is: whole
    keys took half a kilobyte a stream, more than everything else that a sidecar has.
    """

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._new: dict[int, str] = {}
        self._old: dict[int, str] = {}

    def add(self, key: Key, why: str) -> None:
        self._new[hash(key)] = sys.intern(why)
        if len(self._new) >= self._remembered:
            self._old, self._new = self._new, {}

    def get(self, key: Key) -> str | None:
        number = hash(key)
        return self._new.get(number) or self._old.get(number)


class StreamTable:
    """All streams whose producer is an engine of this sidecar."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._streams: dict[Key, _Stream] = {}
        self._ports: dict[Port, _Stream] = {}
        self._sessions: dict[int, set[Port]] = {}
        self._ended = _Ended(limits.remembered)
        self.late_pieces = 0  # dropped because their stream had ended

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def queued_pieces(self) -> int:
        return sum(len(s.queue) for s in self._streams.values())

    @property
    def stalled(self) -> int:
        """Streams with something to send whose consumer grants nothing (or is not there yet)."""
        return sum(1 for _ in self.waiting())

    def waiting(self) -> Iterator[tuple[Key, str, int]]:
        """(stream, consumer replica or "", pieces) of every stream that has something to send and may not."""
        for s in self._streams.values():
            if s.queue or s.starved:
                yield s.key, s.to, WINDOW_PIECES if s.starved else len(s.queue)

    def line(self, port: Port) -> tuple[Port, Port, int] | None:
        """(producer, consumer, token) of the stream of this port, once both are there and there is a line."""
        stream = self._ports.get(port)
        if stream is None or stream.producer is None or stream.consumer is None or not stream.token:
            return None
        return stream.producer, stream.consumer, stream.token

    # --- producer

    def bind(self, port: Port, key: Key, now: float) -> list[Action]:
        """The producer appears; it may have WINDOW_PIECES pieces on the way from the start."""
        if (refusal := self._refusal(port, key)) is not None:
            return [refusal]
        stream = self._streams.get(key) or self._new(key, now)
        if stream.producer is not None:
            return [Fail(port, "StreamClosed", f"{key.edge} of request {key.request} already has a producer")]
        stream.producer = port
        stream.touched = now
        self._attach(port, stream)
        return []

    def put(self, port: Port, piece: Piece, now: float) -> list[Action]:
        stream = self._ports.get(port)
        if stream is None or stream.producer != port:
            self.late_pieces += 1
            return [Drop(piece)]
        put = piece.put
        if stream.complete or (put.seq, put.piece) != (stream.seq, stream.piece):
            message = f"producer sent piece {put.seq}.{put.piece}, expected {stream.seq}.{stream.piece}"
            return [Drop(piece), *self._end(stream, "ProtocolError", message)]
        if len(stream.queue) >= WINDOW_PIECES - _kept(piece):
            return [Drop(piece), *self._end(stream, "ProtocolError", "producer ignored its window")]
        stream.touched = now
        if put.chunk is not None:
            stream.closing = put.chunk.finished
        stream.seq, stream.piece = (put.seq + 1, 0) if put.last else (put.seq, put.piece + 1)
        stream.complete = stream.closing and put.last
        stream.queue.append(piece)
        return self._pump(stream)

    def bypassed(
        self, port: Port, chunks: tuple[tuple[int, float], ...], now: float, *, starved: bool = False
    ) -> list[Action]:
        """The producer has sent the next `chunks` straight to the consumer. None: a word on `starved`, also amid a chunk."""
        stream = self._ports.get(port)
        if stream is None or stream.producer != port:
            return []
        if not stream.token or stream.consumer is None or stream.complete or (chunks and stream.piece):
            return self._end(stream, "ProtocolError", "producer sent chunks past this sidecar that cannot have gone")
        stream.touched = now
        stream.seq += len(chunks)
        stream.starved = starved
        if not chunks:
            return []
        return [Count(stream.consumer, stream.key, stream.to, chunks)]

    # --- consumer

    def open(self, port: Port, key: Key, to: str, credits: int, now: float, token: int = 0) -> list[Action]:
        if (refusal := self._refusal(port, key)) is not None:
            return [refusal]
        stream = self._streams.get(key) or self._new(key, now)
        if stream.consumer is not None:
            return [Fail(port, "StreamClosed", f"{key.edge} of request {key.request} is already open at {stream.to}")]
        stream.consumer = port
        stream.to = to
        stream.token = token
        stream.credits = credits
        stream.touched = now
        self._attach(port, stream)
        return self._pump(stream)

    def credit(self, port: Port, pieces: int, now: float) -> list[Action]:
        stream = self._ports.get(port)
        if stream is None or stream.consumer != port:
            return []
        stream.credits += pieces
        stream.touched = now
        return self._pump(stream)

    def taken(self, port: Port, pieces: int, now: float) -> list[Action]:
        """The consumer has taken chunks that the producer sent straight to it."""
        stream = self._ports.get(port)
        if stream is None or stream.consumer != port:
            return []
        stream.touched = now
        return [Grant(stream.producer, pieces)] if stream.producer is not None and not stream.complete else []

    # --- either

    def cancel(self, port: Port, reason: str) -> list[Action]:
        stream = self._ports.get(port)
        if stream is None:
            return []
        if stream.producer == port:
            return self._end(stream, "UpstreamLost", f"producer gave the request up: {reason}", told=port)
        return self._end(stream, "StreamClosed", f"consumer cancelled: {reason}", told=port)

    def session_lost(self, session: int, reason: str) -> list[Action]:
        """An engine or a peer is gone. What a producer had already completed is still delivered."""
        actions: list[Action] = []
        for port in list(self._sessions.get(session, ())):
            stream = self._ports.get(port)
            if stream is None:
                continue
            if stream.consumer == port:
                actions += self._end(stream, "StreamClosed", f"consumer is gone: {reason}", told=port)
            elif stream.complete:
                self._detach(port)
                stream.producer = None
            else:
                actions += self._end(stream, "UpstreamLost", f"producer is gone: {reason}", told=port)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Janitor: end streams on which nothing has moved for a lease."""
        actions: list[Action] = []
        for stream in list(self._streams.values()):
            if now - stream.touched < self._limits.lease_seconds:
                continue
            if stream.consumer is None:
                message = "no consumer opened the stream in time"
            elif stream.queue or stream.starved:
                message = "the consumer granted no credit in time"
            else:
                message = "the producer sent nothing in time"
            actions += self._end(stream, "DeadlineExceeded", f"{message} ({self._limits.lease_seconds:g} s)")
        return actions

    # --- inside

    def _refusal(self, port: Port, key: Key) -> Fail | None:
        ended = self._ended.get(key)
        if ended is not None:
            return Fail(port, "StreamClosed", f"{key.edge} of request {key.request} has ended: {ended}")
        if port in self._ports:
            return Fail(port, "ProtocolError", f"stream number {port.stream} is in use")
        if len(self._sessions.get(port.session, ())) >= self._limits.streams_per_session:
            return Fail(port, "CapacityExceeded", f"more than {self._limits.streams_per_session} open streams")
        return None

    def _new(self, key: Key, now: float) -> _Stream:
        stream = _Stream(key=key, touched=now)
        self._streams[key] = stream
        return stream

    def _attach(self, port: Port, stream: _Stream) -> None:
        self._ports[port] = stream
        self._sessions.setdefault(port.session, set()).add(port)

    def _detach(self, port: Port) -> None:
        self._ports.pop(port, None)
        ports = self._sessions.get(port.session)
        if ports is not None:
            ports.discard(port)
            if not ports:
                del self._sessions[port.session]

    def _pump(self, stream: _Stream) -> list[Action]:
        actions: list[Action] = []
        sent = 0
        while stream.queue and stream.consumer is not None and stream.credits > _kept(stream.queue[0]):
            stream.credits -= 1
            sent += 1
            actions.append(Deliver(stream.consumer, stream.key, stream.to, stream.queue.popleft()))
        if sent and stream.producer is not None and not stream.complete:
            actions.append(Grant(stream.producer, sent))
        if stream.complete and not stream.queue:
            self._forget(stream, "delivered")
        return actions

    def _end(self, stream: _Stream, code: str, message: str, told: Port | None = None) -> list[Action]:
        """End a stream before it is delivered; both ends hear why, except the one that said so itself."""
        actions: list[Action] = [Drop(piece) for piece in stream.queue]
        stream.queue.clear()
        where = f"{stream.key.edge}: {message}"
        actions += [Fail(p, code, where) for p in (stream.producer, stream.consumer) if p is not None and p != told]
        self._forget(stream, message)
        return actions

    def _forget(self, stream: _Stream, why: str) -> None:
        del self._streams[stream.key]
        for port in (stream.producer, stream.consumer):
            if port is not None:
                self._detach(port)
        self._ended.add(stream.key, why)
