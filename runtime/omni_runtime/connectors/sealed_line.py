"""A line to an engine of another pod, as the engine at either end has it: sealed frames on a TCP connection.

The two sidecars have made the connection and agreed on its keys (`far_lines`); here it is read and written without them,
so that a small chunk wakes one process on its way and not three. A frame is the length of what follows, and that: the
messages of a datagram (`line`), sealed.

Other than a datagram a frame can be lost after it was sent, with the connection, and can be ahead of or behind what the
sidecars bring: the receiver waits for what is missing, and says so when it cannot come.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from omni_runtime.connectors.handshake import KEY_BYTES, TAG_BYTES, nonce

PREFIX: Final = struct.Struct("<I")
INTRODUCTION: Final = 1  # counter of the one frame each way that the sidecars have exchanged
_READ: Final = 64 << 10
_READS_AT_ONCE: Final = 16


def seal(key: AESGCM, counter: int, data: bytes) -> bytearray:
    """A frame."""
    length = len(data) + TAG_BYTES
    frame = bytearray(PREFIX.size + length)
    PREFIX.pack_into(frame, 0, length)
    with memoryview(frame) as view:
        key.encrypt_into(nonce(counter), data, bytes(view[: PREFIX.size]), view[PREFIX.size :])
    return frame


def open_frame(key: AESGCM, counter: int, prefix: bytes, sealed: bytes | memoryview) -> bytes:
    """Raises InvalidTag."""
    return key.decrypt(nonce(counter), sealed, prefix)


class SealedLine:
    """Owns a connected, non-blocking socket, which the sidecar has, too: what was written still goes out when this
    process is killed. `on_frame` gets what was sealed; `on_lost` is called once, not from within a call of its owner.
    """

    def __init__(
        self, fd: int, keys: bytes, longest: int, on_frame: Callable[[bytes], None], on_lost: Callable[[], None]
    ) -> None:
        """`keys`: wire.Granted. Frames of more than `longest` bytes end the line."""
        self._sock = socket.socket(fileno=fd)
        self._sock.setblocking(False)
        self._send_key, self._receive_key = AESGCM(keys[:KEY_BYTES]), AESGCM(keys[KEY_BYTES:])
        self._sent = self._received = INTRODUCTION + 1
        self._longest = longest + TAG_BYTES
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._in = bytearray(max(_READ, PREFIX.size + self._longest))
        self._filled = 0
        self._behind = memoryview(b"")  # of a frame that the kernel has taken in part
        self._written: list[asyncio.Future[None]] = []
        self.closed = False
        self._loop.add_reader(self._sock, self._on_readable)

    # --- out

    def send(self, data: bytes) -> bool:
        """Never waits. False if it cannot go now, or the line is lost."""
        if self.closed or self._behind:
            return False
        frame = seal(self._send_key, self._sent, data)
        try:
            count = self._sock.send(frame)
        except BlockingIOError:  # no byte of it has left, so that its counter may be used again
            return False
        except OSError:
            self._lose()
            return False
        self._sent += 1
        if count < len(frame):
            self._behind = memoryview(frame)[count:]
            self._loop.add_writer(self._sock, self._on_writable)
        return True

    def _on_writable(self) -> None:
        try:
            self._behind = self._behind[self._sock.send(self._behind) :]
        except BlockingIOError:
            return
        except OSError:
            self._lose()
            return
        if not self._behind:
            self._loop.remove_writer(self._sock)
            self._wake()

    async def written(self) -> None:
        """Wait until the kernel has all that was sent, or the line is lost."""
        while self._behind and not self.closed:
            waiting = self._loop.create_future()
            self._written.append(waiting)
            await waiting

    def _wake(self) -> None:
        waiting, self._written = self._written, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    # --- in

    def drain(self) -> None:
        """Take what has come by now."""
        for _ in range(_READS_AT_ONCE):
            if self.closed or not self._on_readable():
                return

    def _on_readable(self) -> bool:
        """Whether there may be more."""
        try:
            with memoryview(self._in) as view:
                count = self._sock.recv_into(view[self._filled :])
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if not count:
            self._lose()
            return False
        self._filled += count
        try:
            self._parse()
        except InvalidTag:  # cut, repeated, reordered or forged
            self._lose()
        return True

    def _parse(self) -> None:
        """Raises InvalidTag."""
        at = 0
        while self._filled - at >= PREFIX.size and not self.closed:
            (length,) = PREFIX.unpack_from(self._in, at)
            if not TAG_BYTES < length <= self._longest:
                raise InvalidTag
            start, end = at + PREFIX.size, at + PREFIX.size + length
            if end > self._filled:
                break
            with memoryview(self._in) as view:
                data = open_frame(self._receive_key, self._received, bytes(view[at:start]), view[start:end])
            self._received += 1
            at = end
            self._on_frame(data)
        if at:
            self._in[: self._filled - at] = self._in[at : self._filled]
            self._filled -= at

    # --- ends

    def _lose(self) -> None:
        if not self.closed:
            self.close()
            self._loop.call_soon(self._on_lost)

    def close(self) -> None:
        """The other end is told, after what was sent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        with contextlib.suppress(OSError):  # it is gone
            self._sock.shutdown(socket.SHUT_WR)
        self._sock.close()
        self._wake()
