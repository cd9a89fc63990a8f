"""The line: small chunks straight from engine to engine, past the sidecars.

Within a pod an engine gets the reading end of its line as it attaches. The consumer of a stream makes up a token for it and tells
its sidecar (`wire.Open`); the sidecar tells the producer (`wire.Paired`) and nobody else, who asks for the consumer's
writing end (`wire.Claim`) and marks with the token what it sends: an engine reaches no stream but its own.

Datagrams of a connected pair: whole or not at all, in order, never a wait, and never lost once the kernel has taken
them, except with the engine that they are for. Between pods it is a connection that the sidecars make (`sealed_line`),
both ways in one, and what is on it is lost with it. A chunk goes at once; small ones that follow it in the same turn of the
loop go together, and so does the first of a turn as long as turns bring several, since most of what a small chunk costs is
waking its reader. Whatever does not go on the line takes the usual way; the consumer puts both in order. What it has
taken it tells the producer on the producer's line, or by the sidecar (`wire.Taken`) while that cannot be. The sidecar is
told afterwards what went this way (`wire.Bypassed`). The finished chunk never goes on the line: ends are the sidecar's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Final

import msgspec

from omni_runtime.connectors import wire
from omni_runtime.connectors.ipc import claim
from omni_runtime.connectors.sealed_line import SealedLine
from omni_runtime.connectors.tensors import ChunkHeader, ChunkMeta, ProtocolError, Tensors, TensorSpec, check_tensors
from omni_runtime.connectors.wire import INLINE_BYTES, WINDOW_PIECES

_CLAIM_SECONDS: Final = 5.0
_HEADERS: Final = 4096  # room for what is not body in a datagram
_LARGEST: Final = INLINE_BYTES + _HEADERS
_TOGETHER: Final = 16  # messages in a datagram
_SMALL: Final = (
    2 << 10
)  # bytes of a chunk that may wait for others; copying a larger one costs more than its system call
_AT_ONCE: Final = 16  # datagrams in one turn of the loop
_QUEUED: Final = 1024  # more than the kernel keeps

_U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Direct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=1):
    """To the consumer: a chunk of one piece."""

    token: int
    session: int  # of the producer
    stream: int  # what the producer calls it
    seq: _U63
    start: _U63
    rows: _U63
    sent_at: float
    tensors: msgspec.Raw  # as in ChunkHeader; those of a stream look alike
    meta: ChunkMeta
    body: bytes


class Room(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=2):
    """To the producer: so many of its chunks have been taken off the line."""

    token: int
    stream: int
    pieces: Annotated[int, msgspec.Meta(ge=1, le=WINDOW_PIECES)]


Held = tuple[int, int, int, ChunkHeader, bytes | bytearray]  # token, stream, seq, header, body


@dataclass(frozen=True, slots=True)
class Heard:
    """What the lines of an attachment tell. It has been checked, except for the token."""

    direct: Callable[[Direct, ChunkHeader, int], None]  # with the session of the line to the producer
    room: Callable[[Room], None]
    refused: Callable[[list[Held]], None]  # chunks that `send` has taken and the line has not
    lost: Callable[[int], None]  # session of a line to another pod; nothing more comes on it


_decode: Final = msgspec.msgpack.Decoder(
    Annotated[list[Direct | Room], msgspec.Meta(min_length=1, max_length=_TOGETHER)]
).decode
_decode_tensors: Final = msgspec.msgpack.Decoder(Tensors).decode


@lru_cache(maxsize=256)
def _tensors(encoded: bytes, nbytes: int) -> tuple[TensorSpec, ...]:
    """Checked. Raises as msgspec does, or ProtocolError."""
    tensors = _decode_tensors(encoded)
    check_tensors(tensors, nbytes)
    return tensors


class _Writer:
    """The writing end of another engine's line."""

    __slots__ = ("chunks", "far", "gathers", "handle", "held")

    def __init__(self) -> None:
        self.handle = -1  # while there is none
        self.far: SealedLine | None = None  # instead: to another pod
        self.chunks = 0  # of this turn of the loop
        self.gathers = False  # the last turn in which there was one had several: the first waits for the others
        self.held: list[Held] = []


class Lines:
    """The lines of one attachment."""

    def __init__(self, path: Path, reading: int, session: int, heard: Heard) -> None:
        self._path = path
        self._session = session
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(_LARGEST))
        self._in = socket.socket(fileno=reading)
        self._in.setblocking(False)
        self._out: dict[int, _Writer] = {}  # by session of the reader, or of the line to another pod
        self._stirred: list[_Writer] = []
        self._claims: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop.add_reader(self._in, self._read, _AT_ONCE)

    def want(self, session: int) -> None:
        """There will be a line to this engine, or one of this number to another pod."""
        if session in self._out or self._closed:
            return
        for other in self._out.values():  # those whose reader is gone cost a descriptor
            if other.far is None:
                self._write(other, b"")
        writer = self._out[session] = _Writer()
        task = self._loop.create_task(self._claim(session, writer))
        self._claims.add(task)
        task.add_done_callback(self._claims.discard)

    async def _claim(self, session: int, writer: _Writer) -> None:
        with contextlib.suppress(OSError, TimeoutError, ProtocolError):
            fd, keys = await claim(self._path, session, _CLAIM_SECONDS)
            if keys:
                taken, lost = partial(self._on_datagram, session=session), partial(self._on_lost, session)
                writer.far = SealedLine(fd, keys, _LARGEST, taken, lost)
            else:
                writer.handle = fd

    def leads_to(self, session: int) -> bool:
        writer = self._out.get(session)
        return writer is not None and (writer.handle >= 0 or writer.far is not None)

    async def written(self, session: int) -> None:
        """Wait until what was sent is the kernel's: from then on only the line can lose it, not the end of this engine."""
        writer = self._out.get(session)
        if writer is not None and writer.far is not None:
            await writer.far.written()

    def send(
        self, session: int, token: int, stream: int, seq: int, header: ChunkHeader, body: bytes | bytearray
    ) -> bool:
        """Never waits. False if it cannot go now. True: it goes, or `on_refused` is told, with the next `flush`, at the end
        of this turn of the loop at the latest; what the sidecar is told after that, the engine hears after it.
        """
        writer = self._out.get(session)
        if writer is None or (writer.handle < 0 and writer.far is None):
            return False
        chunk = (token, stream, seq, header, body)
        held = len(body) <= _SMALL and (writer.chunks > 0 or writer.gathers)
        if writer.held and (not held or len(writer.held) == _TOGETHER):
            self._flush(writer)
        if held:
            writer.held.append(chunk)
        elif not self._write_chunks(writer, [chunk]):
            return False
        if not writer.chunks:
            if not self._stirred:
                self._loop.call_soon(self._end_turn)
            self._stirred.append(writer)
        writer.chunks += 1
        return True

    def flush(self) -> None:
        """Whatever is held goes now: something is about to be said another way."""
        for writer in self._stirred:
            if writer.held:
                self._flush(writer)

    def _end_turn(self) -> None:
        self.flush()
        for writer in self._stirred:
            writer.gathers = writer.chunks > 1
            writer.chunks = 0
        self._stirred.clear()

    def _flush(self, writer: _Writer) -> None:
        chunks, writer.held = writer.held, []
        if self._write_chunks(writer, chunks):
            return
        sent = 0  # too long together, or no room: as many as go, and none after one that does not
        while sent < len(chunks) and self._write_chunks(writer, chunks[sent : sent + 1]):
            sent += 1
        if sent < len(chunks):
            self._heard.refused(chunks[sent:])

    def _write_chunks(self, writer: _Writer, chunks: list[Held]) -> bool:
        data = wire.encode(
            [
                (1, token, self._session, stream, seq, h.start, h.rows, h.sent_at, h.tensors, h.meta, body)  # a Direct
                for token, stream, seq, h, body in chunks
            ]
        )
        return len(data) <= _LARGEST and self._write(writer, data)

    def give_room(self, session: int, token: int, stream: int, pieces: int) -> bool:
        """To the producer of a stream. False if it cannot go now."""
        writer = self._out.get(session)
        return writer is not None and self._write(writer, wire.encode((Room(token, stream, pieces),)))

    def _write(self, writer: _Writer, data: bytes) -> bool:
        if writer.far is not None:
            return writer.far.send(data)
        if writer.handle < 0:
            return False
        try:
            os.write(writer.handle, data)
        except BlockingIOError:
            return False
        except OSError:  # its reader is gone
            os.close(writer.handle)
            writer.handle = -1
            return False
        return True

    def drain(self) -> None:
        """Take everything that was sent before now in this pod, and what is here of what other pods have sent."""
        if not self._closed:
            self._read(_QUEUED)
        for writer in list(self._out.values()):
            if writer.far is not None:
                writer.far.drain()

    def _read(self, most: int) -> None:
        for _ in range(most):
            if self._closed:  # by what the last one has set going
                return
            try:
                count = self._in.recv_into(self._buffer)
            except OSError:  # nothing there
                return
            self._on_datagram(self._buffer[:count])

    def _on_datagram(self, data: bytes | memoryview, session: int | None = None) -> None:
        """`session`: of the line that it came on, from another pod."""
        try:
            messages = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return  # not from an engine that has a stream to here
        for message in messages:
            if isinstance(message, Room):
                self._heard.room(message)
            elif (header := _header(message)) is not None:
                self._heard.direct(message, header, message.session if session is None else session)

    def _on_lost(self, session: int) -> None:
        if not self._closed:
            self._out.pop(session, None)
            self._heard.lost(session)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for task in self._claims:
            task.cancel()
        self._loop.remove_reader(self._in)
        self._in.close()
        for writer in self._out.values():
            writer.held.clear()
            if writer.far is not None:
                writer.far.close()
            if writer.handle >= 0:
                os.close(writer.handle)
        self._out.clear()
        self._stirred.clear()


def _header(direct: Direct) -> ChunkHeader | None:
    """None if what it says of its tensors is not so."""
    nbytes = len(direct.body)
    try:
        tensors = _tensors(bytes(direct.tensors), nbytes)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ProtocolError):
        return None
    return ChunkHeader(direct.start, direct.rows, False, nbytes, direct.sent_at, tensors, direct.meta)
