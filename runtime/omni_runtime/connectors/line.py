"""The line: a small chunk straight from engine to engine of one pod, ahead of the copy that the sidecar relays.

It saves a stream that is not in a hurry one process on the way. What goes over it is only a hint: every chunk takes the
usual way as well, so order, credits, accounting and ends stay with the sidecar, and whatever the line loses (a reader
that pauses, a line that is not there yet, an end that died) costs nothing. The consumer takes whichever copy comes first.

An engine gets the reading end of its line as it attaches. Both ends of a stream are told one token by the sidecar
(`wire.Paired`); the producer asks for the consumer's writing end (`wire.Claim`) and marks with the token what it sends,
so that an engine can reach no stream but its own. Datagrams: never half of one, and never a wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from omni_runtime.connectors import wire
from omni_runtime.connectors.ipc import claim
from omni_runtime.connectors.wire import FRAME_PREFIX, INLINE_BYTES, ProtocolError, Put

_CLAIM_SECONDS: Final = 5.0
_LARGEST: Final = FRAME_PREFIX.size + wire.MAX_HEADER_BYTES + INLINE_BYTES

OnEarly = Callable[[int, Put, bytes], None]  # token, piece, its bytes


class Lines:
    """The lines of one attachment. `on_early` hears what comes in; it has been checked, except for the token."""

    def __init__(self, path: Path, reading: int, on_early: OnEarly) -> None:
        self._path = path
        self._on_early = on_early
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(_LARGEST))
        self._in = socket.socket(fileno=reading)
        self._in.setblocking(False)
        self._out: dict[int, int] = {}  # session of the reader -> descriptor, -1 while there is none
        self._claims: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop.add_reader(self._in, self._on_readable)

    def want(self, session: int) -> None:
        """There will be a line to this engine."""
        if session not in self._out and not self._closed:
            self._out[session] = -1
            task = self._loop.create_task(self._claim(session))
            self._claims.add(task)
            task.add_done_callback(self._claims.discard)

    async def _claim(self, session: int) -> None:
        with contextlib.suppress(OSError, TimeoutError, ProtocolError):
            self._out[session] = await claim(self._path, session, _CLAIM_SECONDS)

    def send(self, session: int, token: int, put: Put, body: bytes | bytearray) -> bool:
        """Never waits: False if it cannot go now."""
        line = self._out.get(session, -1)
        if line < 0:
            return False
        head, tail = wire.frame(wire.Early(token, put), body)
        try:
            os.write(line, b"".join((head, tail)))
        except BlockingIOError:
            return False
        except OSError:  # its reader is gone
            os.close(line)
            self._out[session] = -1
            return False
        return True

    def _on_readable(self) -> None:
        try:
            count = self._in.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:  # nobody can write to it any more: the sidecar is gone
            self._loop.remove_reader(self._in)
            return
        with contextlib.suppress(ProtocolError):  # a hint that makes no sense
            header_length, body_length = wire.parse_prefix(self._buffer)
            body_at = FRAME_PREFIX.size + header_length
            early = wire.decode_early(self._buffer[FRAME_PREFIX.size : body_at])
            put, body = early.put, bytes(self._buffer[body_at:count])
            if len(body) == body_length == put.length and put.slab is None and put.piece == 0 and put.last:
                self._on_early(early.token, put, body)

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
