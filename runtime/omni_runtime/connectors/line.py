"""The line: small chunks straight from engine to engine of one pod, past the sidecar.

An engine gets the reading end of its line as it attaches. The consumer of a stream makes up a token for it and tells
its sidecar (`wire.Open`); the sidecar tells the producer (`wire.Paired`) and nobody else, who asks for the consumer's
writing end (`wire.Claim`) and marks with the token what it sends: an engine reaches no stream but its own.

Datagrams of a connected pair: whole or not at all, in order, never a wait, and never lost once the kernel has taken
them, except with the engine that they are for. Whatever does not go on the line takes the usual way; the consumer
puts both in order. What it has taken it tells the producer on the producer's line, or by the sidecar (`wire.Taken`) while
that cannot be. The sidecar is told afterwards what went this way (`wire.Bypassed`). The finished chunk never goes on the
line: ends are the sidecar's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, cast

import msgspec

from omni_runtime.connectors import wire
from omni_runtime.connectors.ipc import claim
from omni_runtime.connectors.wire import INLINE_BYTES, WINDOW_PIECES, ChunkHeader, ProtocolError, Put

_CLAIM_SECONDS: Final = 5.0
_LARGEST: Final = INLINE_BYTES + 4096
_AT_ONCE: Final = 16  # datagrams in one turn of the loop
_QUEUED: Final = 1024  # more than the kernel keeps


class Source(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Where a chunk comes from: the producer's session, and what it calls the stream."""

    session: int
    stream: int


class Direct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=1):
    """One datagram to the consumer: a chunk of one piece."""

    token: int
    source: Source
    seq: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    chunk: ChunkHeader
    body: bytes


class Room(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=2):
    """One datagram to the producer: so many of its chunks have been taken off the line."""

    token: int
    stream: int
    pieces: Annotated[int, msgspec.Meta(ge=1, le=WINDOW_PIECES)]


OnDirect = Callable[[int, Source, Put, bytes], None]  # token, where from, piece, its bytes
OnRoom = Callable[[Room], None]

_decode: Final = msgspec.msgpack.Decoder(Direct | Room).decode


class Lines:
    """The lines of one attachment. What the callbacks hear has been checked, except for the token."""

    def __init__(self, path: Path, reading: int, session: int, on_direct: OnDirect, on_room: OnRoom) -> None:
        self._path = path
        self._session = session
        self._on_direct = on_direct
        self._on_room = on_room
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(_LARGEST))
        self._in = socket.socket(fileno=reading)
        self._in.setblocking(False)
        self._out: dict[int, int] = {}  # session of the reader -> descriptor, -1 while there is none
        self._claims: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop.add_reader(self._in, self._read, _AT_ONCE)

    def want(self, session: int) -> None:
        """There will be a line to this engine."""
        if session in self._out or self._closed:
            return
        for other in list(self._out):  # those whose reader is gone cost a descriptor
            self._write(other, b"")
        self._out[session] = -1
        task = self._loop.create_task(self._claim(session))
        self._claims.add(task)
        task.add_done_callback(self._claims.discard)

    async def _claim(self, session: int) -> None:
        with contextlib.suppress(OSError, TimeoutError, ProtocolError):
            self._out[session] = await claim(self._path, session, _CLAIM_SECONDS)

    def send(
        self, session: int, token: int, stream: int, seq: int, chunk: ChunkHeader, body: bytes | bytearray
    ) -> bool:
        """Never waits: False if it cannot go now. True: it will be there before the engine hears of anything later."""
        if self._out.get(session, -1) < 0:
            return False
        data = wire.encode(Direct(token, Source(self._session, stream), seq, chunk, cast("bytes", body)))
        return len(data) <= _LARGEST and self._write(session, data)

    def give_room(self, to: Source, token: int, pieces: int) -> bool:
        """To the producer of a stream. False if it cannot go now."""
        return self._out.get(to.session, -1) >= 0 and self._write(
            to.session, wire.encode(Room(token, to.stream, pieces))
        )

    def _write(self, session: int, data: bytes) -> bool:
        line = self._out[session]
        if line < 0:
            return False
        try:
            os.write(line, data)
        except BlockingIOError:
            return False
        except OSError:  # its reader is gone
            os.close(line)
            self._out[session] = -1
            return False
        return True

    def drain(self) -> None:
        """Take everything that was sent before now."""
        if not self._closed:
            self._read(_QUEUED)

    def _read(self, most: int) -> None:
        for _ in range(most):
            if self._closed:  # by what the last one has set going
                return
            try:
                count = self._in.recv_into(self._buffer)
            except OSError:  # nothing there
                return
            try:
                message = _decode(self._buffer[:count])
                if isinstance(message, Room):
                    self._on_room(message)
                    continue
                chunk, body = message.chunk, message.body
                wire.check_chunk(chunk)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ProtocolError):
                continue  # not from an engine that has a stream to here
            if len(body) == chunk.nbytes and not chunk.finished:
                put = Put(0, message.seq, 0, True, len(body), None, chunk)
                self._on_direct(message.token, message.source, put, body)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for task in self._claims:
            task.cancel()
        self._loop.remove_reader(self._in)
        self._in.close()
        for line in self._out.values():
            if line >= 0:
                os.close(line)
        self._out.clear()
